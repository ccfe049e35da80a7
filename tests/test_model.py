"""The model against the Granite classes of transformers, and against itself without shortcuts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import model as model_file
import mup
from config import PRESETS, GPTConfig
from model import GPT
from tools import granite
from tools.tokenizers import Bytes

PROJECT = Path(__file__).parent.parent
TINY = dict(
    n_layer=2, n_embd=32, n_head=4, seq_len=16, vocab_size=256, base_width=16,
    m_emb=3.0, m_res=0.7, logits_scaling=1.3,
)  # fmt: skip
SHAPES = {
    "dense": dict(n_kv_head=2, tie_embeddings=False),
    "MoE": dict(n_kv_head=1, n_expert=4, n_expert_active=2, n_ffn=16),
}


def tiny(**changed) -> GPT:
    """A model far from its first weights, so that no term is negligible."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**TINY | changed))
    mup.init_weights(gpt, mup.rules(gpt.cfg))
    for p in gpt.parameters():
        p.data.add_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    return gpt.eval()


def some_tokens(*shape) -> torch.Tensor:
    # without 255, which transformers takes for padding and does not train
    return torch.randint(255, shape, generator=torch.Generator().manual_seed(1))


# -- Against transformers ----------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_are_those_of_transformers(shape):
    ours = tiny(**SHAPES[shape])
    Path("granite").mkdir()
    granite.write_folder(Path("granite"), ours, Bytes())
    theirs = transformers.AutoModelForCausalLM.from_pretrained("granite")
    idx = some_tokens(3, 16)
    logits = ours(idx)
    torch.testing.assert_close(logits, theirs(idx).logits, rtol=1e-4, atol=1e-5)

    loss, _ = ours(idx[:, :-1], idx[:, 1:])
    their_loss = theirs(idx, labels=idx).loss
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    loss.backward()
    their_loss.backward()
    expected = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.embed.weight.grad, expected, rtol=1e-3, atol=1e-5)


# -- Against itself ----------------------------------------------------------------------


def test_more_tokens_than_seq_len_are_refused():
    with pytest.raises(ValueError, match="17 tokens"):
        tiny()(some_tokens(1, 17))


# -- Sampling ----------------------------------------------------------------------------


@torch.no_grad()
def test_greedy_text_slides_through_the_window():
    gpt = tiny(tie_embeddings=False)  # tied, it repeats one token
    for start, n in ((1, 40), (20, 5)):  # beyond seq_len
        text = some_tokens(3, start)
        expected = text
        for _ in range(n):
            logits = gpt(expected[:, -16:])[:, -1]
            expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(gpt.generate(text, n, temperature=0), expected)


@torch.no_grad()
def test_samples_have_the_probabilities_of_the_top_k():
    gpt = tiny()
    idx = some_tokens(1, 9)
    best, tokens = gpt(idx)[0, -1].topk(3)
    expected = (best / 0.01).softmax(-1)
    torch.manual_seed(0)
    new = gpt.generate(idx.expand(5000, -1), 1, temperature=0.01, top_k=3)[:, -1]
    shares = torch.stack([(new == token).float().mean() for token in tokens])
    assert shares.sum().item() == pytest.approx(1)
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.03)


# -- Without the rest of the project -----------------------------------------------------


def test_five_files_are_enough_to_build_a_gpt():
    Path("tools").mkdir()
    for name in ("model.py", "moe.py", "config.py", "schedules.py", "tools/flags.py"):
        shutil.copy(PROJECT / name, name)
    code = "import config, model; model.GPT(config.make_config(preset='laptop-moe'))"
    alone = os.environ | {"PYTHONPATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=alone).returncode == 0


# -- Size --------------------------------------------------------------------------------

GFLOP = {  # per token, at sequences of 4096
    "12M": 0.175, "36M": 0.422, "121M": 1.13, "1B": 8.76, "1B-moe": 3.18, "PowerLM-3B": 23.3,
    "PowerMoE-3B": 6.50,
}  # fmt: skip


def test_main_lists_all_presets_with_the_operations_of_the_papers_models(capsys):
    assert model_file.main([]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == list(PRESETS)
    shown = {row[0]: float(row[-1]) for row in rows}
    assert GFLOP == {name: pytest.approx(shown[name], rel=0.005) for name in GFLOP}


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_counts_the_same_operations(shape):
    gpt = tiny(**SHAPES[shape])
    idx = some_tokens(3, 17)
    with FlopCounterMode(display=False) as counter:
        gpt(idx[:, :-1], idx[:, 1:])[0].backward()
    counted = counter.get_total_flops() / idx[:, 1:].numel()
    attention = 6 * 2 * 32 * 16  # which torch does not count on a CPU
    assert gpt.flops_per_token() == counted + attention
