"""Kill a run at every write: --resume always enters, and ends with the same bits."""

import os
from pathlib import Path

import pytest
import torch

import forked
import train
from test_resume import assert_same, everything
from test_train import flags, read

CALLS = {"rename": (os, "replace"), "fsync": (os, "fsync"), "unlink": (os, "unlink")}
# steps of 256 tokens, and a checkpoint after each
RUN = dict(decay_tokens=0, warmup_tokens=256, n_layer=1)
RUN |= dict(save_every=256, keep_checkpoints=2)


def train_and_die(argv: list[str], kind: str, k: int) -> None:
    """Train, and end without any cleanup right before the k-th call of this kind."""
    module, name = CALLS[kind]
    real, left = getattr(module, name), [k]

    def counted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)
        return real(*args, **kwargs)

    setattr(module, name, counted)
    os._exit(train.main(argv))


slow = pytest.mark.slow  # the renames are between these


@pytest.mark.parametrize("kind, tokens", [
    ("rename", 768),
    pytest.param("fsync", 768, marks=slow),
    pytest.param("unlink", 1024, marks=slow),  # deletes two checkpoints
])  # fmt: skip
def test_killed_at_any_write_it_resumes_to_the_same_bits(kind, tokens, corpus_path):
    argv = [*flags(corpus_path, **RUN, total_tokens=tokens), "--average"]
    assert train.main([*argv, "--out=whole"]) == 0
    expected, average = everything(Path("whole")), torch.load("whole/average.pt")["model"]
    kills, status = 0, 9
    while status == 9:
        out, kills = f"killed-{kills}", kills + 1
        process = forked.start(train_and_die, [*argv, f"--out={out}"], kind, kills)
        process.join()
        status = process.exitcode
        if status == 9:
            assert train.main([*argv, f"--out={out}", "--resume"]) == 0
        assert_same(everything(Path(out)), expected)
        again = torch.load(f"{out}/average.pt")["model"]
        assert all(torch.equal(again[name], average[name]) for name in average)
        assert (Path(out) / "curve.png").read_bytes()[-8:-4] == b"IEND"
        assert read(Path(out) / "record.json")["tokens"] == tokens
        assert list(Path(out).rglob("*.tmp")) == []
    assert status == 0 and kills > 2
