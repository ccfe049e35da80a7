"""Granite folders, in and out, against transformers. test_model.py has logits, too."""

import json
import shlex
import sys
from pathlib import Path

import harness
import pytest
import safetensors.torch
import tiktoken
import torch
import torch.nn.functional as F

import eval as evaluation
import model as model_file
import train
from config import GPTConfig, make_config
from eval import load_model
from model import GPT
from tools import convert, granite
from tools.prepare import prepare
from tools.run_folder import checkpoint_file, write_checkpoint
from tools.tokenizers import load_tokenizer

SHAPE = dict(
    hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=3, vocab_size=70, max_position_embeddings=96, rms_norm_eps=1e-4,
    embedding_multiplier=3.5, residual_multiplier=0.7, attention_multiplier=0.2,
    logits_scaling=2.5, tie_word_embeddings=True,
    rope_parameters={"rope_theta": 777.7, "rope_type": "default"},
)  # fmt: skip


def write_random(folder: Path, shard="1GB", **fields) -> Path:
    """Random weights in a folder that transformers writes."""
    import transformers

    torch.manual_seed(0)
    kind = "GraniteMoe" if "num_local_experts" in fields else "Granite"
    config = getattr(transformers, f"{kind}Config")(**SHAPE | fields)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    for p in theirs.parameters():
        p.data += torch.randn_like(p) / p.shape[-1] ** 0.5
    theirs.save_pretrained(folder, max_shard_size=shard)
    return folder


def in_transformers(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def assert_same(ours: GPT, theirs) -> None:
    generator = torch.Generator().manual_seed(1)
    idx = torch.randint(ours.cfg.vocab_size, (3, 32), generator=generator)
    expected = theirs(idx).logits
    assert (ours(idx) - expected).abs().max() <= 1e-5 * expected.abs().max()


def change_config(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def write_weights(folder: Path, weights: dict) -> None:
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


# -- In ----------------------------------------------------------------------------------

MOE = dict(num_local_experts=7, num_experts_per_tok=3)
RELEASED = {
    "dense": dict(),
    "wide heads": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1),
    "MoE in shards": dict(shard="30KB", tie_word_embeddings=False, **MOE),
}


@pytest.mark.parametrize("kind", RELEASED)
def test_models_of_transformers_compute_the_same(kind, tmp_path, monkeypatch):
    folder = write_random(tmp_path / "granite", **RELEASED[kind])
    assert ("shards" in kind) == (len(list(folder.glob("*.safetensors"))) > 1)
    theirs = in_transformers(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if not installed
    ours = load_model(folder)
    assert_same(ours, theirs)
    assert ours.cfg.logits_scaling == ours.cfg.m_width == 2.5


def test_older_folders_are_read(tmp_path):
    """transformers 4 wrote rope_theta, and some files have the tied embedding twice."""
    folder = write_random(tmp_path / "granite")
    theirs = in_transformers(folder)
    change_config(folder, rope_parameters=None, rope_theta=777.7, rope_scaling=None)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    write_weights(folder, weights)
    assert_same(load_model(folder), theirs)


def rename_norm(folder: Path) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.other"] = weights.pop("model.norm.weight")
    write_weights(folder, weights)


YARN = {"rope_type": "yarn", "rope_theta": 1e4}
DAMAGES = {  # a part of the error -> what is wrong
    "model.norm": rename_norm,
    "gelu": lambda f: change_config(f, hidden_act="gelu"),
    "yarn": lambda f: change_config(f, rope_parameters=YARN),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_a_model_that_ours_cannot_compute_is_refused(says, tmp_path, one_line):
    folder = write_random(tmp_path / "granite")
    DAMAGES[says](folder)
    assert says in one_line(evaluation.main, ["--model", str(folder), "--device", "cpu"])


# -- Out, and in again -------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A new run, with a checkpoint at 0 tokens."""
    run = tmp_path_factory.mktemp("runs") / "run"
    shape = dict(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, seq_len=96, base_width=20)
    cfg = make_config(**shape, device="cpu")
    write_checkpoint(checkpoint_file(run, 0), train.snapshot(cfg, train.build(cfg)))
    return run


def a_tiktoken():
    """With the pattern of GPT-2. Merges of pairs do not lead to the last token."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"tu", b"et", b"de", b"def", b" a", b"lp", b"ha", b" alpha"]
    pattern = (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    return tiktoken.Encoding(
        "small",
        pat_str=pattern,
        mergeable_ranks={token: i for i, token in enumerate(tokens)},
        special_tokens={"<|endoftext|>": len(tokens)},
    )


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "json"])
def test_an_exported_tokenizer_gives_the_tokens_of_training(kind, documents):
    """Also as lm_eval calls it, which takes the tokens that a post-processor adds."""
    from transformers import AutoTokenizer

    if kind == "bytes":
        tokenizer = load_tokenizer("bytes")
    elif kind == "tiktoken":
        tokenizer = a_tiktoken()
    else:  # adds a token before every text, as others use it
        harness.train_tokenizer(Path("tokenizer.json"), documents, size=300)
        tokenizer = load_tokenizer("tokenizer.json")
    shape = dict(n_layer=1, n_embd=16, n_head=2, seq_len=32, vocab_size=512)
    Path("out").mkdir()
    granite.write_folder(Path("out"), GPT(GPTConfig(**shape)), tokenizer)
    theirs = AutoTokenizer.from_pretrained("out")
    back = load_tokenizer("out/tokenizer.json")
    assert theirs.eos_token_id == back.eot_token == tokenizer.eot_token
    nasty = "  def f(x):\r\n\n\treturn x ,  y .\n Naïve café 東京 😀 don 't  "
    for text in [nasty, *documents[:20]]:
        ids = tokenizer.encode_ordinary(text)
        assert theirs(text).input_ids == back.encode_ordinary(text) == ids
        assert theirs.decode(ids) == text


def test_a_changed_model_is_not_exported(run, tmp_path, monkeypatch, capsys):
    def squared_relu(self, x):
        return self.down(F.relu(self.gate(x)) ** 2 * self.up(x)), None

    monkeypatch.setattr(model_file.MLP, "forward", squared_relu)
    assert convert.main(["export", str(run), "out"]) == 2
    assert "logits" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_training_continues_from_imported_weights(run, documents, capsys):
    """By the printed command, in which the user fills in what the weights do not say."""
    assert convert.main(["export", str(run), "released"]) == 0
    old = load_model("released")
    idx = torch.arange(90)[None]
    assert torch.equal(load_model(run)(idx), old(idx))
    assert convert.main(["import", "released", "imported"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    prepare(documents, "released/tokenizer.json", Path("corpus"))
    argv = shlex.split(command)[2:]
    choices = dict(data="corpus", lr="1e-9", batch_size="4")
    choices |= dict(warmup_tokens="0", total_tokens="2000")
    for name, value in choices.items():
        argv[argv.index(f"--{name}") + 1] = value
    assert train.main([*argv, "--device", "cpu", "--out", "new"]) == 0
    record = json.loads(Path("new/record.json").read_text())
    assert record["results"]["tokens"] == 5 * 4 * 96
    for a, b in zip(load_model("new").parameters(), old.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    for words in (["export", str(run), "released"], ["import", "released", "imported"]):
        assert convert.main(words) == 2  # exists already
