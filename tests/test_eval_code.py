"""Model-written code: we save it, run it only on request, and stop it in time."""

import json
from pathlib import Path

import harness
import pytest

import data
import eval as evaluation
from model import GPT, GPTConfig
from tools import tasks

GOOD = [
    "from __future__ import annotations\nassert 1 + 1 == 2",
    "print('out' * 10**5)\nopen('file', 'w').write('x')",
    "import os, sys\nassert 'SECRET' not in os.environ and sys.stdin.read() == ''",
    "import os\nassert os.listdir() == ['program.py'] and __name__ == '__main__'",
]
BAD = ["assert 1 == 2", "def f(:", "\ud800 = 1\0", "raise SystemExit(0)", "x = bytearray(2**31)"]


@pytest.mark.parametrize("program", GOOD + BAD)
def test_only_programs_that_get_to_their_end_pass(program, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert tasks.passes(program, seconds=600) == (program in GOOD)


def test_a_program_that_never_ends_is_stopped():
    assert not tasks.passes("while True: pass", seconds=1)


def test_code_is_saved_and_runs_only_on_request(monkeypatch, capsys):
    config = GPTConfig(n_layer=1, n_embd=16, n_head=1, seq_len=1200, vocab_size=256)
    harness.export(GPT(config), Path("run"), data.load_tokenizer("bytes"))
    files = {name: harness.items()[name][:3] for name in ("humaneval", "mbpp")}
    harness.write(Path("items"), files)
    texts = {"humaneval": ["    return 0\n", "    return 5\n", ""],
             "mbpp": ["def g(x): return 0", "def g(x): return 5", ""]}  # fmt: skip
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
