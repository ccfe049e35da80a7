"""Granite folders, in and out, against transformers."""

import json
import os
import random
import shlex
import sys
from base64 import b64encode
from pathlib import Path

import harness
import pytest
import safetensors.torch
import torch
import torch.nn as nn
import torch.nn.functional as F

import eval as evaluation
import model as model_file
import train
from config import GPTConfig, make_config
from model import GPT, load_model
from tools import granite
from tools.run_folder import checkpoint_file, write_checkpoint
from tools.tokenizers import load_tokenizer


def save_random(folder: Path, seed=0, tied=False, moe=False, shard="1GB") -> Path:
    """A model of random shape, weights and multipliers, written by transformers."""
    import transformers

    torch.manual_seed(seed)
    rng = random.Random(seed)
    n_kv_head = rng.choice([1, 2, 3])
    n_head = n_kv_head * rng.choice([1, 2, 4])
    theta = rng.choice([10000.0, 777.7])
    fields = dict(
        hidden_size=n_head * rng.choice([8, 16, 64]),
        intermediate_size=8 * rng.randint(2, 25),
        num_hidden_layers=rng.randint(1, 3),
        num_attention_heads=n_head,
        num_key_value_heads=n_kv_head,
        vocab_size=rng.randint(20, 300),
        max_position_embeddings=96,
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        tie_word_embeddings=tied,
        embedding_multiplier=rng.uniform(0.5, 12),
        residual_multiplier=rng.uniform(0.1, 1.3),
        attention_multiplier=rng.uniform(0.01, 0.3),
        logits_scaling=rng.uniform(0.5, 9),
        rope_parameters=dict(rope_theta=theta, rope_type="default"),
    )
    if moe:
        n_expert = rng.randint(2, 10)
        fields["num_local_experts"] = n_expert
        fields["num_experts_per_tok"] = rng.randint(1, n_expert)
        config = transformers.GraniteMoeConfig(**fields)
        theirs = transformers.GraniteMoeForCausalLM(config)
    else:
        theirs = transformers.GraniteForCausalLM(transformers.GraniteConfig(**fields))
    for p in theirs.parameters():
        p.data += torch.randn_like(p) / p.shape[-1] ** 0.5
    theirs.save_pretrained(folder, max_shard_size=shard)
    return folder


def in_transformers(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def assert_same(ours: GPT, theirs) -> None:
    """The same logits, and the same 64 greedy tokens."""
    generator = torch.Generator().manual_seed(1)
    idx = torch.randint(ours.cfg.vocab_size, (3, 32), generator=generator)
    expected = theirs(idx).logits
    assert (ours(idx) - expected).abs().max() <= 1e-5 * expected.abs().max()
    written = theirs.generate(
        idx,
        attention_mask=torch.ones_like(idx),
        do_sample=False,
        max_new_tokens=64,
        min_new_tokens=64,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(ours.generate(idx, 64, temperature=0), written)


def change_config(folder: Path, **fields) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps(config))


def change_weights(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    change(weights)
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


# -- In ----------------------------------------------------------------------------------

RELEASED = {
    "tied": dict(seed=8, tied=True),
    "untied": dict(seed=2),
    "MoE": dict(seed=9, moe=True, tied=True),
    "shards": dict(seed=3, tied=True, shard="30KB"),
    "MoE in shards": dict(seed=0, moe=True, shard="30KB"),
}


@pytest.mark.parametrize("kind", RELEASED)
def test_models_of_transformers_compute_the_same(kind, tmp_path):
    folder = save_random(tmp_path / "granite", **RELEASED[kind])
    assert ("shards" in kind) == (len(list(folder.glob("*.safetensors"))) > 1)
    ours = load_model(folder)
    assert_same(ours, in_transformers(folder))
    config = json.loads((folder / "config.json").read_text())
    assert ours.cfg.logits_scaling == ours.cfg.m_width == config["logits_scaling"]


def test_files_of_older_versions_compute_the_same(tmp_path):
    """transformers 4 wrote rope_theta and torch_dtype."""
    folder = save_random(tmp_path / "granite", seed=10)
    theirs = in_transformers(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert config["rope_theta"] == 777.7
    assert_same(load_model(folder), theirs)


def test_newer_names_of_experts_are_read(tmp_path):
    """Those that the weights have in the memory of transformers 5."""
    folder = save_random(tmp_path / "granite", seed=7, moe=True)
    theirs = in_transformers(folder)
    weights = {name: weight.clone() for name, weight in theirs.state_dict().items()}
    assert any("gate_up_proj" in name for name in weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert_same(load_model(folder), theirs)


def test_weights_keep_their_dtype(tmp_path):
    folder = save_random(tmp_path / "granite", tied=True)

    def halve(weights):
        for name in weights:
            weights[name] = weights[name].bfloat16()

    change_weights(folder, halve)
    assert load_model(folder).embed.weight.dtype == torch.bfloat16
    ours = load_model(folder, dtype=torch.float32)
    assert_same(ours, in_transformers(folder))
    granite.compare(folder, load_model(folder))  # in bfloat16


def drop_norm(weights):
    del weights["model.norm.weight"]


def add_bias(weights):
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(1)


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 999)


YARN = {"rope_type": "yarn", "rope_theta": 1e4}
DAMAGES = {  # what is wrong, and a part of the error
    "broken download": (cut, "model.safetensors"),
    "missing weight": (lambda f: change_weights(f, drop_norm), "model.norm"),
    "bias": (lambda f: change_weights(f, add_bias), "q_proj.bias"),
    "activation": (lambda f: change_config(f, hidden_act="gelu"), "gelu"),
    "positions": (lambda f: change_config(f, rope_parameters=YARN), "yarn"),
    "older positions": (
        lambda f: change_config(f, rope_parameters=None, rope_scaling={"type": "linear"}),
        "linear",
    ),
    "other model": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
        "num_hidden_layers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_our_model_cannot_compute_is_refused(damage, tmp_path, capsys):
    harm, says = DAMAGES[damage]
    folder = save_random(tmp_path / "granite")
    harm(folder)
    capsys.readouterr()
    for main, argv in (
        (evaluation.main, ["--model", str(folder), "--device", "cpu"]),
        (granite.main, ["import", str(folder), "new"]),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
    assert not Path("new").exists()


def test_reading_needs_no_transformers(tmp_path, monkeypatch, capsys):
    folder = save_random(tmp_path / "granite")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if not installed
    load_model(folder)
    assert granite.main(["import", str(folder), "new"]) == 2
    assert "pip install transformers" in capsys.readouterr().err


# -- Out, and in again -------------------------------------------------------------------

KINDS = {
    "dense": dict(),
    "untied": dict(tie_embeddings=False),
    "MoE": dict(n_expert=4, n_expert_active=2, n_ffn=24),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The parent folder of a new run of each kind, with a checkpoint at 0 tokens."""
    folder = tmp_path_factory.mktemp("runs")
    shape = dict(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, seq_len=96, base_width=20)
    for kind, more in KINDS.items():
        cfg = make_config(**shape, **more, device="cpu")
        start = train.checkpoint(cfg, train.build(cfg))
        write_checkpoint(checkpoint_file(folder / kind, 0), start)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_runs_compute_the_same_in_transformers(kind, runs, tmp_path):
    assert granite.main(["export", str(runs / kind), "out"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    ours = load_model(runs / kind)
    assert_same(ours, in_transformers(Path("out")))
    back = load_model("out")
    for a, b in zip(ours.parameters(), back.parameters(), strict=True):
        assert torch.equal(a, b)
    idx = torch.arange(90)[None]
    assert torch.equal(ours(idx), back(idx))
    assert granite.main(["export", str(runs / kind), "out"]) == 2  # exists already


def tokenizer_of(kind: str, documents: list[str]):
    """bytes, or that of a new small file."""
    if kind == "json":  # adds a token before every text, as others use it
        harness.train_tokenizer(Path("tokenizer.json"), documents, size=300)
        return load_tokenizer("tokenizer.json")
    if kind == "tiktoken":
        tokens = [bytes([i]) for i in range(256)]
        merged = [
            "de",
            "def",
            "al",
            "ph",
            "alph",
            "alpha",
            " d",
            " def",
            "et",
            "ret",
            "ur",
        ]
        tokens += [word.encode() for word in merged]
        lines = [f"{b64encode(token).decode()} {i}" for i, token in enumerate(tokens)]
        Path("small.tiktoken").write_text("\n".join(lines))
        return load_tokenizer("small.tiktoken")
    return load_tokenizer("bytes")


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "json"])
def test_an_exported_tokenizer_gives_the_tokens_of_training(kind, documents):
    """Also as lm_eval calls it, which asks for begin and end tokens."""
    from transformers import AutoTokenizer

    tokenizer = tokenizer_of(kind, documents)
    shape = dict(n_layer=1, n_embd=16, n_head=2, seq_len=32, vocab_size=512)
    Path("out").mkdir()
    granite.write_folder(Path("out"), GPT(GPTConfig(**shape)), tokenizer)
    theirs = AutoTokenizer.from_pretrained("out")
    back = load_tokenizer("out/tokenizer.json")
    assert theirs.eos_token_id == back.eot_token == tokenizer.eot_token
    nasty = "  def f(x):\r\n\n\treturn x ,  y .\n Naïve café 東京 😀 don 't  "
    for text in [nasty, *documents[:20]]:
        ids = tokenizer.encode_ordinary(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
        assert back.encode_ordinary(text) == ids


def squared_relu(self, x):
    return self.down(F.relu(self.gate(x)) ** 2 * self.up(x)), None


def near(q, k, v, scale):
    """Attention to the last 64 tokens only."""
    T = q.shape[1]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance >= 0) & (distance < 64)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


CHANGES = {
    "activation": (model_file.MLP, "forward", squared_relu),
    "window": (model_file, "attend", near),  # shows only after 64 tokens
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_not_exported(change, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(*CHANGES[change])
    assert granite.main(["export", str(runs / "dense"), "out"]) == 2
    assert "logits" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_model_with_a_new_weight_is_not_exported(runs, tmp_path):
    model = load_model(runs / "dense")
    model.blocks[1].attn.sink = nn.Parameter(torch.zeros(4))
    with pytest.raises(granite.UserError, match="blocks.1.attn.sink"):
        granite.write_folder(tmp_path, model, load_tokenizer("bytes"))


def test_training_continues_from_imported_weights(runs, corpus_path, capsys):
    """By the printed command, which leaves to the user what the weights do not say."""
    assert granite.main(["export", str(runs / "dense"), "released"]) == 0
    assert granite.main(["import", "released", "imported"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    argv = shlex.split(command)[2:]
    assert argv[argv.index("--branch") + 1] == "imported"
    choices = dict(data=str(corpus_path), lr="1e-9", batch_size="4")
    choices |= dict(warmup_tokens="0", total_tokens="2000")
    for name, value in choices.items():
        argv[argv.index(f"--{name}") + 1] = value
    assert train.main([*argv, "--device", "cpu", "--out", "new"]) == 0
    record = json.loads(Path("new/record.json").read_text())
    assert record["results"]["tokens"] == 5 * 4 * 96
    assert record["config"]["n_embd"] == 32
    for a, b in zip(load_model("new").parameters(), load_model("released").parameters()):
        assert torch.allclose(a, b, atol=1e-6)

    for source, to in (("released", "imported"), ("imported", "x"), ("released", "new")):
        assert granite.main(["import", source, to]) == 2


# -- The released models -----------------------------------------------------------------

PUBLISHED = {  # from the tests of transformers, the mean logit at every position
    "PowerLM-3B": "-3.2934 -2.6019 -2.6258 -2.1691 -2.6394 -2.6876 -2.7032 -2.9688",
    "PowerMoE-3B": "-4.4005 -3.6689 -3.6187 -2.8308 -3.9871 -3.1001 -2.8738 -2.8063",
}


@pytest.mark.skipif("GRANITE_WEIGHTS" not in os.environ, reason="names no folder")
def test_released_weights_give_their_published_logits():
    """GRANITE_WEIGHTS: folder of PowerLM-3B or PowerMoE-3B. Takes 14 GB of memory."""
    model = load_model(os.environ["GRANITE_WEIGHTS"], dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 306, 4658, 278, 6593, 310, 2834, 338]]))[0]
    published = PUBLISHED["PowerMoE-3B" if model.cfg.n_expert else "PowerLM-3B"]
    expected = torch.tensor([float(number) for number in published.split()])
    assert torch.allclose(logits.mean(-1), expected, atol=1e-2)
