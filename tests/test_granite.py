"""Granite checkpoints in and out, against transformers' own classes."""

import json
import math
import os
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

import eval as evaluation
import model as model_file
import train
from model import GPT, load_model
from test_mistakes import one_line

HALF = torch.bfloat16


def save_random(folder: Path, seed=0, tied=False, moe=False, shard="1GB", dtype=torch.float32,
                old=False) -> Path:  # fmt: skip
    """A checkpoint of random shape, weights and multipliers, written by transformers."""
    import transformers

    rng, kind, more = random.Random(seed), "Granite", {}
    torch.manual_seed(seed)
    kv, d_head = rng.choice([1, 2, 3]), rng.choice([8, 16, 64])
    heads = kv * rng.choice([1, 2, 4])
    if moe:
        experts = rng.randint(2, 10)
        kind = "GraniteMoe"
        more = dict(
            num_local_experts=experts, num_experts_per_tok=rng.randint(1, experts)
        )
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=heads * d_head, intermediate_size=8 * rng.randint(2, 25),
        num_hidden_layers=rng.randint(1, 3), num_attention_heads=heads, num_key_value_heads=kv,
        vocab_size=rng.randint(20, 300), max_position_embeddings=96,
        rms_norm_eps=rng.choice([1e-5, 1e-6]), tie_word_embeddings=tied,
        embedding_multiplier=rng.uniform(0.5, 12), residual_multiplier=rng.uniform(0.1, 1.3),
        attention_multiplier=rng.uniform(0.01, 0.3), logits_scaling=rng.uniform(0.5, 9),
        rope_parameters=dict(rope_theta=rng.choice([10000.0, 777.7]), rope_type="default"), **more,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    for p in theirs.parameters():
        p.data.add_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    theirs.to(dtype).save_pretrained(folder, max_shard_size=shard)
    if old:  # as transformers 4 wrote it
        config = json.loads((folder / "config.json").read_text())
        config["torch_dtype"] = config.pop("dtype")
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_transformers(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def assert_same(ours: GPT, theirs) -> None:
    """Logits to 1e-5, and the same 64 greedy tokens."""
    idx = torch.randint(
        ours.cfg.vocab_size, (3, 32), generator=torch.Generator().manual_seed(1)
    )
    a, b = ours(idx), theirs(idx).logits
    assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())
    greedy = dict(
        do_sample=False, max_new_tokens=64, min_new_tokens=64, eos_token_id=None
    )
    written = theirs.generate(
        idx, attention_mask=torch.ones_like(idx), pad_token_id=0, **greedy
    )
    assert torch.equal(ours.generate(idx, 64, temperature=0), written)


@pytest.mark.parametrize("case", range(12))
def test_checkpoints_written_by_transformers(case, tmp_path):
    kind = dict(tied=case % 4 > 0, moe=case % 3 == 2, old=case % 5 == 0)
    dtype, shard = (torch.float32, HALF)[case % 2], ("1GB", "30KB")[case % 6 > 2]
    folder = save_random(tmp_path / "granite", case, **kind, dtype=dtype, shard=shard)
    ours = load_model(folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    assert_same(ours, in_transformers(folder))
    assert ours.cfg.logits_scaling == ours.cfg.m_width == config["logits_scaling"]
    assert ours.cfg.m_emb == config["embedding_multiplier"]
    assert next(load_model(folder).parameters()).dtype == dtype
    assert load_model(folder, dtype=HALF).rope.dtype == torch.float32


RUN = ["--n_layer=2", "--n_embd=32", "--n_head=4", "--n_kv_head=2", "--seq_len=96",
       "--batch_size=2", "--total_tokens=1000", "--warmup_tokens=0", "--device=cpu"]  # fmt: skip
KINDS = {"dense": [], "untied": ["--no-tie_embeddings", "--base_width=20"],
         "MoE": ["--n_expert=4", "--n_expert_active=2", "--n_ffn=24"]}  # fmt: skip


@pytest.fixture(scope="module")
def runs(corpus_path, tmp_path_factory):
    """The parent folder of a run of a few steps of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    for kind, flags in KINDS.items():
        assert (
            train.main([*RUN, *flags, f"--data={corpus_path}", f"--out={folder / kind}"])
            == 0
        )
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_runs_open_in_transformers_and_come_back(kind, runs, corpus_path, tmp_path):
    out = tmp_path / "out"
    assert model_file.main(["--export", str(runs / kind), "--to", str(out)]) == 0
    assert list(tmp_path.iterdir()) == [out]  # nothing is left beside it
    ours, back = load_model(runs / kind), load_model(out)
    assert_same(ours, in_transformers(out))
    same = lambda a, b: torch.equal(a, b) and a.dtype == b.dtype
    assert all(map(same, ours.state_dict().values(), back.state_dict().values()))
    assert torch.equal(ours(torch.arange(90)[None]), back(torch.arange(90)[None]))
    assert (
        evaluation.main([f"--model={out}", f"--data={corpus_path}", "--device=cpu"]) == 0
    )
    # it exists
    assert model_file.main(["--export", str(runs / kind), "--to", str(out)]) == 2


def test_released_weights_can_be_trained_on(corpus_path, runs, capsys):
    """--import, then --branch: these weights, a new optimizer, tokens from 0."""
    model_file.main(["--export", str(runs / "dense"), "--to", "released"])
    assert model_file.main(["--import", "released", "--to", "released.pt"]) == 0
    flags = [
        "--branch=released.pt",
        f"--data={corpus_path}",
        "--device=cpu",
        "--total_tokens=2000",
    ]
    shape = ["--seq_len=64", "--batch_size=4", "--warmup_tokens=0"]
    assert (
        train.main([*flags, *shape, "--schedule=constant", "--lr=1e-9", "--out=new"]) == 0
    )
    record = json.loads(Path("new/record.json").read_text())
    assert record["results"]["tokens"] == 1792
    assert record["config"]["n_embd"] == 32 and record["config"]["seq_len"] == 64
    assert record["origin"]["parent"] == str(Path("released.pt").absolute())
    pairs = zip(
        load_model("new").parameters(), load_model("released").parameters(), strict=True
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    capsys.readouterr()
    for wrong, flag in ((["--n_layer=3", "--lr=1e-4"], "--n_layer 3"), ([], "--branch")):
        assert flag in one_line(train.main, [*flags, *wrong], capsys)
    for argv in (["released", "--to=released.pt"], ["new", "--to=x"], ["released"]):
        one_line(model_file.main, ["--import", *argv], capsys)


def test_a_diverged_model_is_not_exported(runs, capsys):
    checkpoint = max((runs / "dense/ckpt").glob("*.pt"))
    saved = torch.load(checkpoint, weights_only=True)
    saved["model"]["norm.weight"].fill_(math.nan)
    torch.save(saved, "diverged.pt")
    error = one_line(model_file.main, ["--export", "diverged.pt", "--to", "x"], capsys)
    assert "it diverged" in error and not Path("x").exists()


def write(content: str, name: str = "config.json"):
    return lambda folder: (folder / name).write_text(content)


def rename_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.extra"] = weights.pop("model.norm.weight")
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


def change(**fields):
    """Write a config.json with other values."""

    def write_config(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return write_config


def add_a_head(folder: Path) -> None:
    """An lm_head that is not the embedding, which the config says it is."""
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    change(tie_word_embeddings=True)(folder)


def quantize(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights = {name: tensor.to(torch.int8) for name, tensor in weights.items()}
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


YARN = {"rope_type": "yarn"}
LINEAR = {"type": "linear", "factor": 4}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
NO_OBJECT = '["model_type"]'
INDEX = "model.safetensors.index.json"
LOST = '{"weight_map": {"x": "model-00001.safetensors"}}'
LIST = '{"weight_map": ["model.safetensors"]}'
DAMAGES = {
    "missing tensor": (rename_a_tensor, '"norm.weight"'),
    "extra tensor": (rename_a_tensor, '"model.extra"'),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 999), "model.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "other architecture": (change(model_type="llama"), "'llama'"),
    "other activation": (change(hidden_act="gelu"), "'gelu'"),
    "scaled rope": (change(rope_parameters=YARN), "yarn"),
    "older name": (change(rope_parameters=None, rope_scaling=LINEAR), "linear"),
    "two ropes": (change(rope_parameters=DEFAULT, rope_scaling=LINEAR), "linear"),
    "a rope for each layer": (change(rope_parameters=["x"]), "rope_parameters is ['x']"),
    "half a rope": (change(rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}), "0.5"),
    "theta": (change(rope_parameters=DEFAULT | {"rope_theta": "500000"}), "'500000'"),
    "bias": (change(attention_bias=True), "attention_bias"),
    "head": (change(head_dim=12), "head_dim is 12"),
    "float layers": (change(num_hidden_layers=2.0), "2.0, not of type int"),
    "no size": (write('{"model_type": "granite"}'), "lacks num_hidden_layers"),
    "not JSON": (write('{"model_type": "granite",'), "config.json"),
    "null": (write("null"), "is it a run folder?"), "a list": (write(NO_OBJECT), "config.json"),
    "null index": (write("null", INDEX), INDEX), "no index": (write("{}", INDEX), INDEX),
    "a list of files": (write(LIST, INDEX), INDEX),
    "lost shard": (write(LOST, INDEX), "model-00001.safetensors"),
    "second head": (add_a_head, "lm_head differs from the embedding"),
    "whole numbers": (quantize, "is it quantized?"),
    "no tokenizer": (lambda f: None, "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_in_one_line(damage, tmp_path, capsys):
    harm, says = DAMAGES[damage]
    folder = save_random(tmp_path / "granite")
    harm(folder)
    capsys.readouterr()
    evaluate = ["--model", str(folder), "--tasks", "piqa", "--data", "."]
    export = ["--export", str(folder), "--to", "new"]
    for main, argv in ((evaluation.main, evaluate), (model_file.main, export)):
        assert says in one_line(main, argv, capsys)
    assert not Path("new").exists()


def test_weights_of_several_dtypes_get_the_widest(tmp_path):
    folder = save_random(tmp_path / "granite", dtype=HALF)
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    for name in sorted(weights)[::2]:
        weights[name] = weights[name].float()
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    ours = load_model(folder)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same(ours, in_transformers(folder))


def test_a_changed_model_is_not_exported(runs, monkeypatch, capsys):
    """Granite's silu would compute something else with the weights of a relu²."""

    def forward(self, x):
        return self.down(torch.relu(self.gate(x)) ** 2 * self.up(x)), None

    monkeypatch.setattr(model_file.MLP, "forward", forward)
    argv = ["--export", str(runs / "dense"), "--to", "new"]
    assert "transformers computes logits that differ" in one_line(
        model_file.main, argv, capsys
    )
    assert not list(Path().iterdir())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert model_file.main(argv) == 0
    assert "not compared" in capsys.readouterr().out


def test_a_failed_export_leaves_nothing(runs, tmp_path, monkeypatch, capsys):
    run = str(runs / "dense")
    for source, to in (("nowhere", "x"), (run, "/proc/no/x")):
        one_line(model_file.main, ["--export", source, "--to", to], capsys)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert "No space left" in one_line(
        model_file.main, ["--export", run, "--to", "x"], capsys
    )
    assert not list(tmp_path.iterdir())


PUBLISHED = {  # transformers' own tests: mean logits at each position of these ids, fp16
    "PowerLM-3B": [
        -3.2934,
        -2.6019,
        -2.6258,
        -2.1691,
        -2.6394,
        -2.6876,
        -2.7032,
        -2.9688,
    ],
    "PowerMoE-3B": [
        -4.4005,
        -3.6689,
        -3.6187,
        -2.8308,
        -3.9871,
        -3.1001,
        -2.8738,
        -2.8063,
    ],
}


@pytest.mark.skipif(
    "GRANITE_WEIGHTS" not in os.environ, reason="GRANITE_WEIGHTS names no folder"
)
def test_published_logits():
    """GRANITE_WEIGHTS: folder of PowerLM-3B or PowerMoE-3B. In float32: 14 GB of memory."""
    model = load_model(os.environ["GRANITE_WEIGHTS"], dtype=torch.float32)
    with torch.no_grad():
        means = model(torch.tensor([[1, 306, 4658, 278, 6593, 310, 2834, 338]]))[0].mean(
            -1
        )
    published = PUBLISHED["PowerMoE-3B" if model.cfg.n_expert else "PowerLM-3B"]
    assert torch.allclose(means, torch.tensor(published), atol=1e-2)
