"""Every patch in forks/ applies, trains three steps, and resumes to the same bits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parent.parent
FORKS = sorted((PROJECT / "forks").glob("*.patch"))
TRAIN = """
import sys
from functools import partial
import train
from tools import plots

plots.draw_curve = lambda *_: None
train.sample = partial(train.sample, max_new_tokens=20)
shape = "--n_layer 1 --n_embd 32 --n_head 2 --seq_len 32 --batch_size 4".split()
length = "--total_tokens 384 --warmup_tokens 128 --final_eval_tokens 64".split()
flags = [*shape, *length, "--data", sys.argv[1]]
assert train.main([*flags, "--out=whole"]) == 0
assert train.main([*flags, "--out=parts", "--time_limit=0"]) == 3  # after a step
assert train.main([*flags, "--out=parts", "--resume"]) == 0
"""


@pytest.mark.parametrize("patch", FORKS, ids=lambda patch: patch.stem)
def test_a_fork_trains_and_resumes_to_the_same_bits(patch, corpus_path):
    for file in [*PROJECT.glob("*.py"), PROJECT / "figures.mplstyle"]:
        shutil.copy(file, ".")
    shutil.copytree(PROJECT / "tools", "tools")
    subprocess.run(["git", "apply", patch], check=True)
    changed = [line[6:] for line in patch.read_text().splitlines() if line[:4] == "+++ "]
    for name in changed:
        assert Path(name).read_text() != (PROJECT / name).read_text()
    Path("train_it.py").write_text(TRAIN)
    # a new process, because ours has imported the files without the patch
    subprocess.run([sys.executable, "train_it.py", corpus_path], check=True)
    whole, parts = (torch.load(f"{out}/ckpt/{384:016d}.pt") for out in ("whole", "parts"))
    for name in ("config", "seconds"):
        del whole[name], parts[name]
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    assert ("average" in whole) == (patch.stem == "average")
