"""research/bench_nanogpt.py, with a small model in place of nanoGPT's."""

import bench_nanogpt
from test_mistakes import one_line

NANOGPT = """
import dataclasses, torch
import torch.nn.functional as F

@dataclasses.dataclass
class GPTConfig:
    n_layer: int; n_head: int; n_embd: int; block_size: int; vocab_size: int
    dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, idx, targets):
        logits = self.embed(idx) @ self.embed.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)
"""


def test_it_prints_ratios_of_models_that_learn_and_refuses_others(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "model.py").write_text(NANOGPT)
    monkeypatch.setattr(bench_nanogpt, "SHAPES", [(64, 128)])
    argv = ["--nanogpt", str(tmp_path), "--bfloat16", "--rounds=3"]
    assert bench_nanogpt.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("nanoGPT's tokens per second" in x for x in lines[1:])
    monkeypatch.setattr(bench_nanogpt, "LEARNING_RATE", 1.0)  # what groups had unset
    assert "ours did not learn" in one_line(bench_nanogpt.main, argv, capsys)
