"""Export a run as a Granite folder, which transformers opens, or import such a folder.

    python -m tools.convert export runs/a granite      write a run as a Granite folder
    python -m tools.convert import PowerLM-3B runs/b   make a run of released weights

Both compare our logits with those of transformers.
"""

import dataclasses
import os
import shlex
import sys
import tempfile
from pathlib import Path

from config import make_config
from eval import load_model
from tools import flags, granite
from tools.flags import UserError
from tools.run_folder import checkpoint_file, write_checkpoint, write_config
from tools.tokenizers import copy_tokenizer, identity, load_tokenizer


def export(run: Path, to: Path) -> str:
    """Write a run or checkpoint as a folder that appears whole or not at all."""
    model = load_model(run)
    tokenizer = load_tokenizer(model.run["tokenizer"])
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as temporary:
        folder = Path(temporary, to.name)
        folder.mkdir()
        granite.write_folder(folder, model, tokenizer)
        granite.compare(folder, model)
        os.rename(folder, to)
    return f"{to}: {model.n_params():,} parameters, same logits in transformers"


def import_weights(folder: Path, to: Path) -> str:
    """Write released weights as a run of 0 tokens, from which train.py can branch."""
    if not granite.is_granite(folder):
        raise UserError(f"{folder}: is no Granite folder")
    model = load_model(folder)
    granite.compare(folder, model)
    # the batch size, the intervals and so on of the paper's models, not of the laptop's
    preset = "PowerMoE-3B" if model.cfg.n_expert else "PowerLM-3B"
    tokenizer = model.run["tokenizer"]
    fields = model.run | {"tokenizer": identity(tokenizer), "out": str(to)}
    cfg = make_config(preset=preset, **fields)
    content = {
        "config": dataclasses.asdict(cfg),
        "tokens": 0,
        "model": model.state_dict(),
        "optimizer": {},  # no moments yet
    }
    write_checkpoint(checkpoint_file(to, 0), content)
    copy_tokenizer(tokenizer, Path(), to)
    write_config(cfg)
    return (
        f"{to}: {model.n_params():,} parameters, same logits in transformers\n"
        "To train them further, choose the values in capitals:\n"
        f"python train.py --branch {shlex.quote(str(to))} --data CORPUS --schedule wsd "
        "--lr LR --batch_size N --warmup_tokens N --total_tokens N"
    )


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("tools.convert", __doc__)
    parser.add_argument("action", choices=("export", "import"))
    parser.add_argument("source", type=Path, help="run, or Granite folder to import")
    parser.add_argument("to", type=Path, help="new Granite folder, or new run")
    args = parser.parse_args(argv)
    act = export if args.action == "export" else import_weights
    try:
        if args.to.exists():
            raise UserError(f"{args.to}: already exists; choose another folder")
        print(act(args.source, args.to))
    except (UserError, OSError, ImportError) as error:  # such as no transformers
        return flags.fail("tools.convert", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
