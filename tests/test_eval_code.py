"""Code that a model wrote: it is saved, runs only on request, and cannot hold up the evaluation."""

import json
from pathlib import Path

import harness
import pytest

import data
import eval as evaluation
from model import GPT, GPTConfig
from tools import tasks

SOLVED = "def add(a, b):\n    return a + b\n\nassert add(2, 3) == 5\n"
GOOD = [
    SOLVED,
    "from __future__ import annotations\n" + SOLVED,
    "print('out' * 10**5)\nopen('file', 'w').write('x')",
    "import os, sys\nassert 'SECRET' not in os.environ and sys.stdin.read() == ''",
    "import os\nassert os.listdir() == ['program.py'] and __name__ == '__main__'",
]
BAD = {
    "fails": "assert 1 == 2", "is not Python": "def f(:", "is not text": "\ud800 = 1\0",
    "exits early": "raise SystemExit(0)", "exits at once": "import os\nos._exit(0)",
    "eats memory": "x = bytearray(2**31)", "waits for input": "input()",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
}  # fmt: skip


@pytest.mark.parametrize("program", GOOD)
def test_right_programs_pass(program, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert tasks.passes(program, seconds=600)


@pytest.mark.parametrize("kind", BAD)
def test_wrong_programs_fail(kind):
    assert not tasks.passes(BAD[kind], seconds=600)


def test_a_program_that_never_ends_is_stopped():
    assert not tasks.passes("while True: pass", seconds=1)


def test_code_is_saved_and_runs_only_on_request(monkeypatch, capsys):
    """From the command line to samples.jsonl, with a model that knows its answers by heart."""
    config = GPTConfig(n_layer=1, n_embd=16, n_head=1, seq_len=1200, vocab_size=256)
    harness.export(GPT(config), Path("run"), data.load_tokenizer("bytes"))
    files = {name: harness.items()[name][:3] for name in ("humaneval", "mbpp")}
    harness.write(Path("items"), files)
    texts = {name: ["    return 0\n", "    return 5\n", ""] for name in files}
    texts["mbpp"] = ["def g(x): return 0", "def g(x): return 5", ""]
    ran, passes = [], tasks.passes
    monkeypatch.setattr(tasks, "passes", lambda code: ran.append(code) or passes(code, seconds=600))
    monkeypatch.setattr(evaluation, "answer", lambda name, *_: texts[name])
    argv = "--model run --tasks humaneval,mbpp --data items --out scores.json --device cpu".split()
    for allowed in (False, True):
        assert evaluation.main([*argv, *["--allow_code_execution"] * allowed]) == 0
        out, scores = capsys.readouterr().out, json.loads(Path("scores.json").read_text())
        for name, docs in files.items():
            lines = Path(name, "samples.jsonl").read_text().splitlines()
            pairs = zip(docs, texts[name])
            expected = [{"task_id": doc["task_id"], "completion": text} for doc, text in pairs]
            assert [json.loads(line) for line in lines] == expected
            assert scores[name].get("pass@1") == (pytest.approx(1 / 3) if allowed else None)
            assert scores[name]["n"] == 3 and f"{name}/samples.jsonl" in out
        assert len(ran) == 6 * allowed and ("not run" in out) != allowed
