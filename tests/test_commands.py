"""Every command of the README is run, in its order, in a world where all models and grids are tiny."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import test_fit
from test_readme import BLOCKS, README

import data
import eval as evaluation
import fit
import model as model_file
import moe
import mup
import schedules
import sweep
import train

PROGRAMS = {"train.py": train, "sweep.py": sweep, "fit.py": fit, "data.py": data, "eval.py": evaluation, "model.py": model_file, "moe.py": moe, "mup.py": mup, "schedules.py": schedules}
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines() if line.startswith("python ")]
COMMANDS += re.findall(r"`(python \w+\.py[^`]*)`", re.sub(r"```.*?```", "", README, flags=re.S))
SHAPE = dict(n_layer=1, n_embd=32, n_head=2, seq_len=32, vocab_size=256, base_width=32)
RECIPE = dict(batch_size=8, total_tokens=4096, warmup_tokens=256, decay_tokens=None, lr=0.01, power_a=5.0, log_every=1024, eval_every=2048, eval_tokens=1024, save_every=1024)
COMMON = SHAPE | dict(warmup_tokens=256, eval_tokens=1024)


@pytest.fixture
def world(monkeypatch, tmp_path, corpus_path, documents):
    """Small presets, grids and corpora, and the folders that the README's lines name."""
    for name, preset in model_file.PRESETS.items():
        mixture = dict(n_expert=4, n_expert_active=2, n_ffn=32) if preset.get("n_expert") else {}
        monkeypatch.setitem(model_file.PRESETS, name, SHAPE | mixture)
        monkeypatch.setitem(train.RECIPES, name, RECIPE)
    one = dict(common=COMMON, rows=[(dict(n_embd=32, n_head=2), [4], 1)], budgets=[1024], guess=0.02, rates=[14])
    trials = dict(cosine=[14], wsd=[14], power=[4])
    for scale in ("quick", "laptop"):
        for experiment in ("wsd", "transfer", "beyond"):
            monkeypatch.setitem(sweep.GRIDS[experiment], scale, one)
        monkeypatch.setitem(sweep.GRIDS["power"], scale, one | dict(a=[1], b=[0.02]))
        monkeypatch.setitem(sweep.GRIDS["compare"], scale, one | dict(tune=(dict(n_embd=32, n_head=2), 4, 1024), trials=trials))
    monkeypatch.setattr(data, "embedded_corpus", lambda tokenizer="bytes": data.open_corpus(corpus_path))
    monkeypatch.setattr(train, "sample", lambda *_: "")
    home = tmp_path / "home"
    for folder, suffix, texts in (("notes", "txt", documents), ("lib", "py", documents[::-1]), ("torch", "py", documents[100:] + documents[:50])):
        (home / folder).mkdir(parents=True)
        for i, text in enumerate(texts):
            (home / folder / f"{i}.{suffix}").write_text(text)
    for i, package in enumerate(re.search(r"\$LIB/\{(.*?)\}", README)[1].split(",")):
        (home / "lib" / package).mkdir()
        for k in range(10):
            (home / "lib" / package / f"{k}.py").write_text("".join(documents[(i + k) % 300 :]))
    for name in ("code", "math", "mine", "web"):
        data.prepare(documents, "bytes", Path("data") / name)
    for name, value in (("HOME", home), ("TORCH", home / "torch"), ("LIB", home / "lib")):
        monkeypatch.setenv(name, str(value))
    Path("items").mkdir()
    for name, item in {
        "arc_easy": dict(question="def", choices=dict(text=["alpha", "beta"], label=["A", "B"]), answerKey="B"), "piqa": dict(goal="def", sol1="x", sol2="y", label=0),
        "mmlu": dict(question="def", choices=list("abcd"), answer=1, subject="code"), "mmlu.dev": dict(question="def", choices=list("abcd"), answer=1, subject="code"),
    }.items():  # fmt: skip
        Path(f"items/{name}.jsonl").write_text((json.dumps(item) + "\n") * 6)
    made_up = dict(wsd=test_fit.wsd_records(noise=0.004, cells=0.08), power=test_fit.power_records(), compare=test_fit.compare_records(), transfer=test_fit.transfer_records())
    made_up = {f"{name}-{scale}": records for name, records in made_up.items() for scale in ("quick", "laptop")}
    made_up |= {"wsd-laptop-long": made_up["wsd-laptop"], "beyond-laptop": test_fit.wsd_records(budgets=[6_400_000], batches=[4], widths=[64], seeds=1)}
    for name, records in made_up.items():
        longer = {"warmup_tokens": 50_000} if name in ("wsd-laptop-long", "compare-laptop") else {}
        Path("fits/runs", name).mkdir(parents=True)
        Path("fits/runs", name, "records.jsonl").write_text("".join(json.dumps(r | longer) + "\n" for r in records))
    Path("fits/results").symlink_to("runs")
    for name in ("power", "wsd", "moe-power"):
        Path(f"fits/runs/laptop-{name}-1").mkdir()
        Path(f"fits/runs/laptop-{name}-1/metrics.jsonl").write_text("".join(json.dumps(dict(tokens=n, loss=5 / n, val_loss=5 / n)) + "\n" for n in range(1, 40)))


def words_of(command: str) -> list[str]:
    """As the shell takes them apart: variables, braces, ~ and comments."""
    line = command.removeprefix("python ")
    return subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def smaller(words: list[str]) -> list[str]:
    """Numbers of tokens a thousandth, and nothing that has to be downloaded."""
    words = [str(round(float(word) / 1000 / 256) * 256) if before.endswith("_tokens") and word[0].isdigit() else word for before, word in zip(["", *words], words)]
    return ["bytes" if word == "gpt2" else word for word in words]


def test_every_command_runs(world, corpus_path, monkeypatch, capsys):
    done = set()
    for command in dict.fromkeys(["python train.py --schedule power", *COMMANDS]):
        file, *argv = words_of(command)
        argv = smaller(argv) if file != "fit.py" else argv
        if file == "-c":
            exec(argv[0])
            continue
        if "hf:" in command or "power_q" in command or file in ("moe.py", "mup.py") or "data/notebooks" in command or "web/**" in command:
            continue  # the network; a fork; what other tests run
        if "PowerLM-3B" in argv and not Path("PowerLM-3B").exists():  # as if it had been downloaded
            assert model_file.main(["--export", "runs/a", "--to", "PowerLM-3B"]) == 0
        if file == "sweep.py":
            argv += [f"--data={corpus_path}", "--workers=1", "--device=cpu"]
        if file in ("train.py", "eval.py"):
            argv += ["--device=cpu"]
        with monkeypatch.context() as there:
            if file == "fit.py":
                there.chdir("fits")
            status = PROGRAMS[file].main(argv)
        assert status == 0, f"{command}\n{capsys.readouterr().err[-500:]}"
        done.add(file)
    assert done == set(PROGRAMS) - {"moe.py", "mup.py"}
