"""Do a resumed run, a branch and a run of a sweep end with the same bits as a whole run?

    python research/exact.py --preset laptop-moe    and any other flag of train.py

Print a line of JSON with the largest difference of a weight. A sweep keeps no weights, so
there it is the difference of the validation loss.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sweep
import train
from config import make_config
from tools import files, run_folder


def weights(run: str) -> torch.Tensor:
    """All weights at the end of a run, as a vector."""
    saved = run_folder.read_checkpoint(run_folder.newest_checkpoint(Path(run)))
    return torch.nn.utils.parameters_to_vector(saved["model"].values())


def differences(argv: list[str]) -> dict[str, float]:
    """Train all runs in the current folder. Returns their differences from the first."""
    # 1. The whole run, one that stops after its first step, and a branch at the decay
    train.main([*argv, "--out=whole"])
    train.main([*argv, "--out=resumed", "--time_limit=0"])
    train.main(["--out=resumed", "--resume"])
    train.main(["--branch=whole", "--out=branch"])
    whole = weights("whole")
    found = {}
    for run in ("resumed", "branch"):
        found[run] = (weights(run) - whole).abs().max().item()

    # 2. A sweep, in which the run starts from the trunk of a shorter one
    record = files.read_json(Path("whole/record.json"))
    cfg = make_config(**record["config"])
    half = cfg.total_tokens // 2
    shorter = dataclasses.replace(cfg, total_tokens=half)
    for run in (shorter, cfg):
        results = sweep.train_from(Path("trunk.pt"), run)
    found["sweep"] = abs(results["val_loss"] - record["results"]["val_loss"])
    return found


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with contextlib.redirect_stdout(sys.stderr):
            found = differences(argv)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
