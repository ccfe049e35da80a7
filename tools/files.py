"""Files that survive a crash: written whole or not at all, appended line by line,
locked."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden, temporary name. At the end of the block, its file replaces `path`.

    Until then `path` is as it was, so a crash or a power cut never leaves half a file. A
    crash may leave the temporary file. Raises OSError if the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())  # a rename must not reach the disk before the content
        os.replace(temporary, path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise OSError(f"{path}: cannot be written ({reason})") from None
        raise


def nan_to_none(content: dict) -> dict:
    """The same content with None for NaN and infinity, which JSON does not have."""
    return json.loads(json.dumps(content), parse_constant=lambda name: None)


def write_json(path: Path, content: dict) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def all_files(folder: Path) -> list[Path]:
    """All files and links below a folder, in the order of their names, without hidden ones.

    It does not follow links to folders. Raises OSError if a folder may not be read, which
    glob would leave out.
    """

    def refuse(error: OSError):
        raise OSError(f"{error.filename}: cannot be read ({error.strerror})")

    found = []
    for top, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(top, name))]
        found += [Path(top, name) for name in [*names, *links] if name[0] != "."]
    return sorted(found)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, and end a half-written last line. Raises OSError, naming the file."""
    try:
        with open(path, "ab+") as file:
            torn = False
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = file.read() != b"\n"
            file.write(b"\n" * torn + line.encode("utf-8") + b"\n")
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror})") from None


def lock(path: Path):
    """Lock a file until what we return is closed. None if it is locked already."""
    import fcntl  # here, because only Unix has it

    file = open(path, "a+")  # NFS wants a file that is open for reading and writing
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:  # the file system has no locks
        raise OSError(f"{path}: cannot be locked ({error.strerror})") from None
    return file


def read_metrics(run: Path) -> list[dict]:
    """The whole lines of metrics.jsonl by tokens. If a resumed run repeats one, the last counts."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    found = {}
    for line in text.splitlines():
        # a crash may have left half a line
        with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
            metrics = json.loads(line)
            key = (metrics["tokens"], "val_loss" in metrics)
            found[key] = metrics
    return [found[key] for key in sorted(found)]
