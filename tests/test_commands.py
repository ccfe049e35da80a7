"""Every command of README and docs runs, in a world of tiny models, grids and corpora."""

import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from test_readme import PAGES, ROOT

import data
import model as model_file
import sweep
import train

SHAPE = dict(n_layer=1, n_embd=32, n_head=2, seq_len=32, vocab_size=256, base_width=32)
RECIPE = dict(
    batch_size=8, total_tokens=4096, warmup_tokens=256, lr=0.01, power_a=5.0,
    log_every=1024, eval_every=2048, eval_tokens=1024, save_every=1024,
)  # fmt: skip
ROW = dict(n_embd=32, n_head=2)
GRID = dict(
    common=SHAPE | dict(warmup_tokens=256, eval_tokens=1024), rows=[(ROW, [4], 1)], budgets=[1024],
    guess=0.02, rates=[14], a=[1], b=[0.02], tune=(ROW, 4, 1024),
    trials=dict(cosine=[14], wsd=[14], power=[4]),
)  # fmt: skip
# not run: help, the network, forks, and two checks that take long and have tests
SKIPPED = r"--help|hf:|power_q|data/notebooks|\*\*/\*\.jsonl|moe\.py|mup\.py"
FIRST = ("README.md", "train.md")  # the others use the runs of these pages


def commands() -> list[str]:
    """In the order of the pages: lines of shell blocks, and code in the text."""
    found = ["python train.py --schedule power", "python train.py --schedule wsd"]
    for _, text in sorted(PAGES.items(), key=lambda page: (page[0] not in FIRST, page[0])):
        for block in re.findall(r"```sh\n(.*?)```", text, re.S):
            found += re.findall(r"^python (?:\w+\.py|-c).*$", block, re.M)
        found += re.findall(r"`(python \w+\.py[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [line for line in dict.fromkeys(found) if not re.search(SKIPPED, line)]


@pytest.fixture
def world(monkeypatch, corpus_path, documents):
    """Small presets and grids; the folders and files that the commands name."""
    for name, preset in model_file.PRESETS.items():
        experts = dict(n_expert=4, n_expert_active=2, n_ffn=32) if preset.get("n_expert") else {}
        monkeypatch.setitem(model_file.PRESETS, name, SHAPE | experts)
        monkeypatch.setitem(train.RECIPES, name, RECIPE)
    for scales in sweep.GRIDS.values():
        for scale, usual in scales.items():
            tiny = {name: GRID[name] for name in GRID if name in {*usual, "rates"}}
            monkeypatch.setitem(scales, scale, tiny)
    monkeypatch.setattr(data, "embedded_corpus", lambda *_, **__: data.open_corpus(corpus_path))
    packages = re.search(r"\$LIB/\{(.*?)\}", PAGES["train.md"])[1].split(",")
    for k, folder in enumerate(["notes", "torch", "lib", *(f"lib/{name}" for name in packages)]):
        Path("home", folder).mkdir(parents=True)
        for i in range(40):
            Path("home", folder, f"{i}.py").write_text("".join(documents[7 * i + k :][:9]))
    for name, folder in (("HOME", "home"), ("TORCH", "home/torch"), ("LIB", "home/lib")):
        monkeypatch.setenv(name, str(Path(folder).absolute()))
    for name in ("code", "math", "mine", "web"):
        data.prepare(documents, "bytes", Path("data") / name)
    write_items(Path("items"))
    write_records(Path("fits"))


def write_items(folder: Path) -> None:
    folder.mkdir()
    arc = dict(choices=dict(text=["a", "b"], label=["A", "B"]), answerKey="B")
    mmlu = dict(choices=list("abcd"), answer=1, subject="code")
    piqa = dict(goal="def", sol1="x", sol2="y", label=0)
    for name, item in {"arc_easy": arc, "piqa": piqa, "mmlu": mmlu, "mmlu.dev": mmlu}.items():
        line = json.dumps({"question": "def"} | item) + "\n"
        (folder / f"{name}.jsonl").write_text(6 * line)


def write_records(folder: Path) -> None:
    """The committed records, also as if they were the user's; thinned, so that fits are quick."""
    for path in (ROOT / "results").iterdir():
        lines = (path / "records.jsonl").read_text(encoding="utf-8").splitlines()
        if path.name.startswith("wsd"):
            kept = lambda r: r["n_embd"] == 64 and r["seed"] < 2
            lines = [line for line in lines if kept(json.loads(line))]
        quick = path.name.replace("laptop", "quick")
        for name in (f"results/{path.name}", f"runs/{path.name}", f"runs/{quick}"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "records.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copy(ROOT / "results/wsd-laptop/law.json", folder / "results/wsd-laptop")


def words_of(command: str) -> list[str]:
    """As the shell splits them: variables, braces, ~ and comments. Token counts become tiny."""
    script = "printf '%s\\0' " + command.removeprefix("python ")
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    words = result.stdout.split("\0")[:-1]
    for i, flag in enumerate(words[:-1]):
        if flag.endswith("_tokens") and words[0] != "fit.py":
            words[i + 1] = str(max(256, round(float(words[i + 1]) / 256_000) * 256))
    return ["bytes" if word == "gpt2" else word for word in words]


def test_every_command_runs(world, corpus_path, monkeypatch, capsys):
    for command in commands():
        file, *argv = words_of(command)
        if file == "-c":
            exec(argv[0])
            continue
        if "PowerLM-3B" in argv and not Path("PowerLM-3B").exists():  # as if downloaded
            assert model_file.main(["--export", "runs/a", "--to", "PowerLM-3B"]) == 0
        if file == "sweep.py":
            argv += [f"--data={corpus_path}", "--workers=1"] + ["--dry_run"] * ("--widths" in argv)
        if file in ("train.py", "eval.py", "sweep.py", "bench.py"):
            argv += ["--device=cpu"]
        with monkeypatch.context() as there:
            if file == "fit.py" and "--curves" not in argv:
                there.chdir("fits")
            status = import_module(file.removesuffix(".py")).main(argv)
        assert status == 0, f"{command}\n{capsys.readouterr().err[-500:]}"
