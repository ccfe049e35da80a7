"""Model-written code: we save it, with programs that test it."""

import json
import subprocess
import sys
from pathlib import Path

import harness

import data
import eval as evaluation
from model import GPT, GPTConfig

TEXTS = {"humaneval": ["    return 0\n", "    return 5\n", ""],
         "mbpp": ["def g(x): return 0", "def g(x): return 5", ""]}  # fmt: skip


def test_code_is_saved_with_its_test(monkeypatch):
    config = GPTConfig(n_layer=1, n_embd=16, n_head=1, seq_len=1200, vocab_size=256)
    harness.export(GPT(config), Path("run"), data.load_tokenizer("bytes"))
    files = {name: harness.items()[name][:3] for name in TEXTS}  # the right answers are 0, 1, 2
    harness.write(Path("items"), files)
    monkeypatch.setattr(evaluation, "answer", lambda name, *_: TEXTS[name])
    argv = "--model run --tasks humaneval,mbpp --data items --out scores.json --device cpu".split()
    assert evaluation.main(argv) == 0
    scores = json.loads(Path("scores.json").read_text())
    for name, docs in files.items():
        assert scores[name]["samples"] == f"{name}.samples.jsonl" and scores[name]["n"] == 3
        lines = Path(f"{name}.samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert [sample["task_id"] for sample in samples] == [doc["task_id"] for doc in docs]
        assert [sample["completion"] for sample in samples] == TEXTS[name]
        run = lambda code: subprocess.run([sys.executable, "-c", code], capture_output=True)
        failed = [run(sample["program"]).returncode != 0 for sample in samples]
        assert failed == [False, True, True]
