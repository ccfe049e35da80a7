"""Every patch in forks/ applies, trains three steps, and resumes to the same bits."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import forked

PROJECT = Path(__file__).parent.parent
FORKS = sorted((PROJECT / "forks").glob("*.patch"))


def train_the_fork(corpus_path: Path) -> None:
    """Train a whole run and one in two parts, with the files of the current folder."""
    for file in PROJECT.glob("*.py"):
        sys.modules.pop(file.stem, None)
    for name in list(sys.modules):
        if name.split(".")[0] == "tools":
            del sys.modules[name]
    sys.path.insert(0, str(Path.cwd()))
    import train

    assert Path(train.__file__).parent == Path.cwd()
    train.sample = partial(train.sample, max_new_tokens=20)
    train.figures.draw_curve = lambda *_: None
    shape = "--n_layer 1 --n_embd 32 --n_head 2 --seq_len 32 --batch_size 4".split()
    length = "--total_tokens 384 --warmup_tokens 128 --final_eval_tokens 64".split()
    flags = [*shape, *length, f"--data={corpus_path}"]
    assert train.main([*flags, "--out=whole"]) == 0
    assert train.main([*flags, "--out=parts", "--time_limit=0"]) == 3  # after a step
    assert train.main([*flags, "--out=parts", "--resume"]) == 0


@pytest.mark.parametrize("patch", FORKS, ids=lambda patch: patch.stem)
def test_a_fork_trains_and_resumes_to_the_same_bits(patch, corpus_path):
    for file in PROJECT.glob("*.py"):
        shutil.copy(file, ".")
    shutil.copytree(PROJECT / "tools", "tools")
    subprocess.run(["git", "apply", patch], check=True)
    changed = [line[6:] for line in patch.read_text().splitlines() if line[:4] == "+++ "]
    for name in changed:
        assert Path(name).read_text() != (PROJECT / name).read_text()
    process = forked.start(train_the_fork, corpus_path)
    process.join()
    assert process.exitcode == 0, forked.printed(process)
    whole, parts = (torch.load(f"{out}/ckpt/{384:016d}.pt") for out in ("whole", "parts"))
    del whole["config"], parts["config"]
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    assert ("average" in whole) == (patch.stem == "average")
