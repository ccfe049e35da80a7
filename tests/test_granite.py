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
import transformers

import eval as evaluation
import model as model_file
import train
from config import GPTConfig, make_config
from eval import load_model
from model import GPT
from tools import convert, granite
from tools.prepare import prepare
from tools.run_folder import checkpoint_file, write_checkpoint
from tools.tokenizers import NASTY_TEXT, load_tokenizer

SHAPE = dict(
    hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=3, vocab_size=70, max_position_embeddings=96, rms_norm_eps=1e-4,
    embedding_multiplier=3.5, residual_multiplier=0.7, attention_multiplier=0.2,
    logits_scaling=2.5, tie_word_embeddings=True,
    rope_parameters={"rope_theta": 777.7, "rope_type": "default"},
)  # fmt: skip


def write_random(shard="1GB", **fields) -> Path:
    """A folder that transformers writes, with random weights."""
    torch.manual_seed(0)
    kind = "GraniteMoe" if "num_local_experts" in fields else "Granite"
    config = getattr(transformers, f"{kind}Config")(**SHAPE | fields)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    for p in theirs.parameters():
        p.data += torch.randn_like(p) / p.shape[-1] ** 0.5
    theirs.save_pretrained("granite", max_shard_size=shard)
    return Path("granite")


def change_config(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_weight(folder: Path, name: str, new_name: str) -> None:
    """Write a weight once more, under a new name."""
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights[new_name] = weights[name].clone()
    safetensors.torch.save_file(weights, file, {"format": "pt"})


# -- In ----------------------------------------------------------------------------------

MOE = dict(num_local_experts=7, num_experts_per_tok=3)
RELEASED = {
    "dense": dict(num_attention_heads=2, num_key_value_heads=1),
    "MoE in shards": dict(shard="30KB", tie_word_embeddings=False, **MOE),
}


@pytest.mark.parametrize("kind", RELEASED)
def test_models_of_transformers_compute_the_same(kind, monkeypatch):
    folder = write_random(**RELEASED[kind])
    assert ("shards" in kind) == (len(list(folder.glob("*.safetensors"))) > 1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)  # as if not installed
        ours = load_model(folder)
    granite.compare(folder, ours)
    assert ours.cfg.logits_scaling == ours.cfg.m_width == 2.5


def test_older_folders_are_read():
    """transformers 4 wrote rope_theta, and some files have the tied embedding twice."""
    folder = write_random()
    change_config(folder, rope_parameters=None, rope_theta=777.7, rope_scaling=None)
    change_weight(folder, "model.embed_tokens.weight", "lm_head.weight")
    granite.compare(folder, load_model(folder))


@pytest.mark.parametrize("says, fields", [
    ("activation", dict(hidden_act="gelu")),
    ("rotary", dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})),
    ("model.other", {}),
])  # fmt: skip
def test_a_model_that_ours_cannot_compute_is_refused(says, fields, one_line):
    folder = write_random()
    change_config(folder, **fields)
    if not fields:
        change_weight(folder, "model.norm.weight", "model.other")
    line = one_line(evaluation.main, ["--model", str(folder), "--device", "cpu"])
    assert says in line


# -- Out, and in again -------------------------------------------------------------------


@pytest.fixture
def run() -> Path:
    """A new run, with a checkpoint at 0 tokens."""
    shape = dict(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, seq_len=96, base_width=20)
    cfg = make_config(**shape, device="cpu")
    content = train.snapshot(cfg, train.build(cfg))
    write_checkpoint(checkpoint_file(Path("run"), 0), content)
    return Path("run")


def a_tiktoken() -> tiktoken.Encoding:
    """Merges of pairs do not lead to its last token. Its numbers have a gap."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"tu", b"et", b"de", b"def", b" a", b"lp", b"ha", b" alpha"]
    return tiktoken.Encoding(
        "small",
        pat_str=r" ?\p{L}+|[^\p{L}]",
        mergeable_ranks={token: i for i, token in enumerate(tokens)},
        special_tokens={"<|endoftext|>": 300},
    )


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "words.json"])
def test_an_exported_tokenizer_gives_the_tokens_of_training(kind, documents):
    """Also as lm_eval calls it, which takes the tokens that a post-processor adds."""
    harness.train_tokenizer("words.json", documents, size=300)
    tokenizer = a_tiktoken() if kind == "tiktoken" else load_tokenizer(kind)
    shape = dict(n_layer=1, n_embd=16, n_head=2, seq_len=32, vocab_size=512)
    Path("out").mkdir()
    granite.write_folder(Path("out"), GPT(GPTConfig(**shape)), tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    back = load_tokenizer("out/tokenizer.json")
    assert theirs.eos_token_id == back.eot_token == tokenizer.eot_token
    for text in [NASTY_TEXT, *documents[:20]]:
        ids = tokenizer.encode_ordinary(text)
        assert theirs(text).input_ids == back.encode_ordinary(text) == ids
        assert theirs.decode(ids) == text


def test_a_changed_model_is_not_exported(run, tmp_path, monkeypatch, capsys):
    def squared_relu(self, x):
        return self.down(F.relu(self.gate(x)) ** 2 * self.up(x)), None

    monkeypatch.setattr(model_file.MLP, "forward", squared_relu)
    assert convert.main(["export", str(run), "out"]) == 2
    assert "logits" in capsys.readouterr().err.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_training_continues_from_imported_weights(run, documents, capsys):
    """By the printed command, in which the user fills in what the weights do not say."""
    assert convert.main(["export", str(run), "released"]) == 0
    old = load_model("released")
    idx = torch.arange(90)[None]
    assert torch.equal(load_model(run)(idx), old(idx))
    assert convert.main(["import", "released", "imported"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert load_tokenizer(load_model("imported").run["tokenizer"]).n_vocab == 256
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
