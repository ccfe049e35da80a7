"""Files appear whole or not at all, lines are whole, and a lock that cannot be had says where."""

import errno
import json
import os
from pathlib import Path

import pytest
from tools import files


def test_a_failed_write_leaves_the_old_file_and_nothing_else():
    files.write_json(Path("s.json"), {"old": 1})
    Path("s.tmp").write_text("of somebody else")
    with pytest.raises(TypeError):
        files.write_json(Path("s.json"), {"new": object()})
    with pytest.raises(OSError, match="s.json: cannot be written"):
        with files.replacing(Path("s.json")) as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert json.loads(Path("s.json").read_text()) == {"old": 1}
    files.write_json(Path("s.json"), {"new": 2})
    assert json.loads(Path("s.json").read_text()) == {"new": 2}
    assert sorted(os.listdir()) == ["s.json", "s.tmp"]
    assert Path("s.tmp").read_text() == "of somebody else"


@pytest.mark.parametrize("before", ["", "one\n", "one\ntw", None])
def test_appended_lines_start_on_a_line_of_their_own(before):
    if before is not None:
        Path("lines").write_text(before)
    files.append_line(Path("lines"), "new")
    assert Path("lines").read_text().splitlines() == [*(before or "").splitlines(), "new"]


def test_a_full_disk_is_named():
    """/dev/full is a disk that is always full."""
    Path("full").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match="^full: cannot be written .No space left on device.$"
    ):
        files.append_line(Path("full"), "new")


def test_a_lock_is_held_until_it_is_closed(monkeypatch):
    held = files.lock(Path("lock"))
    assert files.lock(Path("lock")) is None
    held.close()
    files.lock(Path("lock")).close()

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(OSError, match="^lock: cannot be locked .No locks available.$"):
        files.lock(Path("lock"))
