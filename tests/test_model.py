"""The model against transformers, against a dumb loop, and its size against torch."""

from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import mup
from config import GPTConfig
from model import GPT, sample
from tools import granite
from tools.tokenizers import Bytes

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


class Ascii:
    """A token is a character."""

    n_vocab = 128  # the model has more
    eot_token = 127

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@torch.no_grad()
def test_a_greedy_sample_slides_through_the_window_and_ends_with_the_document():
    gpt = tiny(tie_embeddings=False)  # tied, it repeats one token
    prompt = "longer than the window"
    expected = prompt
    for _ in range(40):
        window = torch.tensor([[ord(x) for x in expected[-16:]]])
        expected += chr(gpt(window)[0, -1, :128].argmax())
    tokenizer = Ascii()
    assert sample(gpt, tokenizer, prompt, 40, temperature=0) == expected
    end = expected[len(prompt) + 9]
    tokenizer.eot_token = ord(end)
    ended = expected[: expected.index(end, len(prompt))]
    assert sample(gpt, tokenizer, prompt, 40, temperature=0) == ended


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_counts_the_same_operations(shape):
    gpt = tiny(**SHAPES[shape])
    idx = some_tokens(3, 17)
    with FlopCounterMode(display=False) as counter:
        gpt(idx[:, :-1], idx[:, 1:])[0].backward()
    counted = counter.get_total_flops() / idx[:, 1:].numel()
    attention = 6 * 2 * 32 * 16  # which torch does not count on a CPU
    assert gpt.flops_per_token() == counted + attention
