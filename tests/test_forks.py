"""Every patch in forks/ applies, trains three steps, and resumes to the same bits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
FORKS = sorted((PROJECT / "forks").glob("*.patch"))
TRAIN = """
import sys
import torch
import train

shape = "--n_layer 1 --n_embd 32 --n_head 2 --seq_len 32 --batch_size 4".split()
length = "--total_tokens 384 --warmup_tokens 128 --final_eval_tokens 64".split()
flags = [*shape, *length, "--data", sys.argv[1]]
assert train.main([*flags, "--out", "whole"]) == 0
assert train.main([*flags, "--out", "parts", "--time_limit", "0"]) == 3  # after a step
assert train.main([*flags, "--out", "parts", "--resume"]) == 0
whole, parts = (torch.load(f"{out}/ckpt/{384:016d}.pt") for out in ("whole", "parts"))
del whole["config"], parts["config"]
torch.testing.assert_close(parts, whole, rtol=0, atol=0)
print(*sorted(whole))
"""


@pytest.mark.parametrize("patch", FORKS, ids=lambda patch: patch.stem)
def test_a_fork_trains_and_resumes_to_the_same_bits(patch, corpus_path):
    for file in PROJECT.glob("*.py"):
        shutil.copy(file, ".")
    shutil.copy(PROJECT / "figures.mplstyle", ".")
    shutil.copytree(PROJECT / "tools", "tools")
    before = [file.read_text() for file in sorted(Path().glob("*.py"))]
    subprocess.run(["git", "apply", patch], check=True)
    assert before != [file.read_text() for file in sorted(Path().glob("*.py"))]
    Path("try_it.py").write_text(TRAIN)
    command = [sys.executable, "try_it.py", corpus_path]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if patch.stem == "average":
        assert "average" in printed.splitlines()[-1]
