"""Code that a model wrote: it runs, it is judged, and whatever it does, the next item runs."""

import json
import os
import time
from pathlib import Path

import pytest

import data
import eval as evaluation
from eval import passes
from model import GPT, GPTConfig, export_granite

SOLVED = "def add(a, b):\n    return a + b\n\nassert add(2, 3) == 5\n"
HOSTILE = {
    "loops forever": "while True: pass", "sleeps forever": "import time\ntime.sleep(10**6)", "eats memory": "x = []\nwhile True: x.append(bytearray(2**24))",
    "eats memory at once": "x = bytearray(2**40)", "prints without end": "while True: print('x' * 10000)",
    "writes without end": "f = open('big', 'w')\nwhile True: f.write('x' * 2**20); f.flush()",
    "forks": "import os\nwhile True: os.fork()", "leaves a child behind": "import os, time\nif os.fork() == 0: time.sleep(1000)\nraise SystemExit(7)",
    "looks for a secret": "import os\nassert os.environ['EVAL_TEST_SECRET']",
    "looks for a secret next door": "import os\nassert b'EVAL_TEST_SECRET' in open(f'/proc/{PARENT}/environ', 'rb').read()",
    "opens a socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT), timeout=2)",
    "exits early": "raise SystemExit(0)", "exits at once": "import os\nos._exit(0)", 
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)", "fails": "assert 1 == 2", "is not Python": "def f(:", "is not text": "\ud800 = 1\0",
    "reads what is typed": "input()", "closes everything": "import os\n[os.close(i) for i in range(3)]\nassert 0",
    "has an odd name": "import time\nopen('/proc/self/comm', 'wb').write(b') \\xff')\ntime.sleep(1000)",
    "nests folders": "import os, time\nfor _ in range(1200): os.mkdir('d'), os.chdir('d')\ntime.sleep(1000)",
    "catches everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(evaluation, "RUN_SECONDS", 1.0)


def processes() -> int:
    return sum(1 for _ in Path("/proc").glob("[0-9]*"))


def test_right_programs_pass():
    assert passes(SOLVED)
    assert passes("import heapq, math, re, collections, itertools\nprint('out' * 10**5)\nopen('file', 'w').write('x')\nassert heapq.nsmallest(1, [3, 2]) == [2]")
    assert passes("from threading import Thread\nt = Thread(target=print)\nt.start()\nt.join()")
    assert passes("import os, sys\nassert set(os.environ) <= {'LC_CTYPE'} and os.listdir() == ['program.py'] and sys.stdin.read() == ''")


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_programs_are_ended_and_fail(kind, quick, monkeypatch):
    monkeypatch.setenv("EVAL_TEST_SECRET", "hidden")
    if kind in ("opens a socket", "looks for a secret next door") and not evaluation.isolation():
        pytest.skip("this system offers no namespaces to users")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        program = HOSTILE[kind].replace("PARENT", str(os.getpid())).replace("PORT", str(server.getsockname()[1]))
        before, began = processes(), time.monotonic()
        assert not passes(program)
        assert time.monotonic() - began < 30  # on a machine that has other things to do
    for _ in range(100):
        if processes() <= before + 5:  # others come and go
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"{processes() - before} processes are left")
    assert passes(SOLVED) or passes(SOLVED)  # the next item runs (a busy machine gets a second chance)


def test_a_fork_bomb_is_seen_without_namespaces(quick, monkeypatch):
    monkeypatch.setattr(evaluation, "isolation", lambda: ())
    began = time.monotonic()
    assert not passes("import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)")
    assert not passes("import os\nwhile True: os.fork()")
    assert not passes("import os\nassert os.environ['EVAL_TEST_SECRET']")
    assert passes(SOLVED) and time.monotonic() - began < 60


ADD = {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add", "test": "def check(f):\n    assert f(2, 3) == 5\n", "canonical_solution": ""}
MUL = {"task_id": 11, "text": "Multiply.", "code": "", "test_list": ["assert mul(2, 3) == 6", "assert mul(0, 1) == 0", "assert mul(1, 1) == 1"]}


def test_humaneval_and_mbpp(monkeypatch, capsys):
    """From the command line to samples.jsonl, with a model that knows its answers by heart."""
    model = GPT(GPTConfig(n_layer=1, n_embd=16, n_head=1, seq_len=1200, vocab_size=256))
    export_granite(model, Path("run"), 255, data.tokenizer_files(data.load_tokenizer("bytes")))
    answers = {"humaneval": ["    return a + b\n", "    return a - b\n", "    while True: pass\n"], "mbpp": ["def mul(a, b):\n    return a * b\n", "def mul(a, b): return 1", ""]}
    items = {"humaneval": [ADD | {"task_id": f"HumanEval/{i}"} for i in range(3)], "mbpp": [MUL | {"task_id": i} for i in range(11, 14)]}
    for name, docs in items.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    monkeypatch.setattr(evaluation, "RUN_SECONDS", 3.0)
    ran = []
    monkeypatch.setattr(evaluation, "passes", lambda program: (ran.append(program), passes(program))[1])
    monkeypatch.setattr(evaluation, "write", lambda model, tokenizer, prompts, *rest: answers["mbpp" if "[BEGIN]" in prompts[0] else "humaneval"])
    argv = ["--model", "run", "--tasks", "humaneval,mbpp", "--data", ".", "--out", "scores.json", "--device", "cpu"]
    for allowed in (False, True):
        capsys.readouterr()
        assert evaluation.main(argv + ["--allow_code_execution"] * allowed) == 0
        out, scores = capsys.readouterr().out, json.loads(Path("scores.json").read_text())
        for name, docs in items.items():
            lines = [json.loads(line) for line in Path(name, "samples.jsonl").read_text().splitlines()]
            assert lines == [{"task_id": doc["task_id"], "completion": text} for doc, text in zip(docs, answers[name])]
            assert scores[name].get("pass@1") == (pytest.approx(1 / 3) if allowed else None)
            assert scores[name]["n"] == 3 and scores[name]["samples"] == f"{name}/samples.jsonl"
        assert len(ran) == 6 * allowed and ("not run" in out) != allowed


def test_the_help_says_what_running_code_means(capsys):
    with pytest.raises(SystemExit):
        evaluation.main(["--help"])
    assert "no security boundary" in " ".join(capsys.readouterr().out.split())


def test_the_code_is_saved_before_it_runs(monkeypatch):
    """It took hours to write, and running it may end the evaluation."""
    export_granite(GPT(GPTConfig(n_layer=1, n_embd=16, n_head=1, seq_len=1200, vocab_size=256)), Path("run"), 255, data.tokenizer_files(data.load_tokenizer("bytes")))
    Path("humaneval.jsonl").write_text(json.dumps(ADD) + "\n")
    monkeypatch.setattr(evaluation, "write", lambda *args: ["    return a + b\n"])

    def full(program):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluation, "passes", full)
    assert evaluation.main(["--model", "run", "--tasks", "humaneval", "--data", ".", "--device", "cpu", "--allow_code_execution", "--out", "scores.json"]) == 2
    assert json.loads(Path("humaneval/samples.jsonl").read_text())["completion"] == "    return a + b\n"
