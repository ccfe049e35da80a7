"""Every command of README and docs runs, in a world where all models, grids and corpora are tiny."""

import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from test_readme import PAGES, ROOT

import data
import eval as evaluation
import model as model_file
import sweep
import train

SHAPE = dict(n_layer=1, n_embd=32, n_head=2, seq_len=32, vocab_size=256, base_width=32)
RECIPE = dict(
    batch_size=8, total_tokens=4096, warmup_tokens=256, lr=0.01, power_a=5.0,
    log_every=1024, eval_every=2048, eval_tokens=1024, save_every=1024,
)  # fmt: skip
SKIPPED = r"--help|hf:|power_q|data/notebooks|\*\*/\*\.jsonl|moe\.py|mup\.py"  # network, forks, own tests
READ = ("README.md", "train.md")  # the pages whose runs the others use come first


def commands() -> list[str]:
    """In the order of the pages: lines of shell blocks, and code in the text."""
    found = []
    for _, text in sorted(PAGES.items(), key=lambda page: (page[0] not in READ, page[0])):
        for block in re.findall(r"```sh\n(.*?)```", text, re.S):
            found += [line for line in block.splitlines() if re.match(r"python (\w+\.py|-c)", line)]
        found += re.findall(r"`(python \w+\.py[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    found = ["python train.py --schedule power", "python train.py --schedule wsd", *found]
    return [line for line in dict.fromkeys(found) if not re.search(SKIPPED, line)]


def records_of(name: str) -> str:
    """The committed records, thinned so that a fit takes a second."""
    lines = (ROOT / "results" / name / "records.jsonl").read_text(encoding="utf-8").splitlines()
    if name.startswith("wsd"):
        lines = [line for line in lines if (r := json.loads(line))["n_embd"] == 64 and r["seed"] < 2]
    return "\n".join(lines) + "\n"


@pytest.fixture
def world(monkeypatch, corpus_path, documents):
    """Small presets, grids and corpora; the folders and files that the commands name."""
    for name, preset in model_file.PRESETS.items():
        experts = dict(n_expert=4, n_expert_active=2, n_ffn=32) if preset.get("n_expert") else {}
        monkeypatch.setitem(model_file.PRESETS, name, SHAPE | experts)
        monkeypatch.setitem(train.RECIPES, name, RECIPE)
    row = dict(n_embd=32, n_head=2)
    grid = dict(common=SHAPE | dict(warmup_tokens=256, eval_tokens=1024), rows=[(row, [4], 1)])
    grid |= dict(budgets=[1024], guess=0.02, rates=[14], a=[1], b=[0.02], tune=(row, 4, 1024))
    grid |= dict(trials=dict(cosine=[14], wsd=[14], power=[4]))
    for experiment, scales in sweep.GRIDS.items():
        for scale, usual in scales.items():
            tiny = {name: value for name, value in grid.items() if name in {*usual, "rates"}}
            monkeypatch.setitem(scales, scale, tiny)
    monkeypatch.setattr(data, "embedded_corpus", lambda *_, **__: data.open_corpus(corpus_path))
    packages = re.search(r"\$LIB/\{(.*?)\}", PAGES["train.md"])[1].split(",")
    for folder in ("notes", "torch", "lib", *(f"lib/{package}" for package in packages)):
        (Path("home") / folder).mkdir(parents=True)
        for i in range(40):
            Path("home", folder, f"{i}.py").write_text("".join(documents[(7 * i + len(folder)) % 290 :][:9]))
    for name, folder in (("HOME", "home"), ("TORCH", "home/torch"), ("LIB", "home/lib")):
        monkeypatch.setenv(name, str(Path(folder).absolute()))
    for name in ("code", "math", "mine", "web"):
        data.prepare(documents, "bytes", Path("data") / name)
    write_items()
    for path in (ROOT / "results").iterdir():
        for name in (f"results/{path.name}", f"runs/{path.name}", f"runs/{path.name.replace('laptop', 'quick')}"):
            Path("fits", name).mkdir(parents=True, exist_ok=True)
            Path("fits", name, "records.jsonl").write_text(records_of(path.name))
    shutil.copy(ROOT / "results/wsd-laptop/law.json", "fits/results/wsd-laptop")


def write_items() -> None:
    letters = dict(choices=list("abcd"), answer=1, subject="code", question="def")
    for name, item in {
        "arc_easy": dict(question="def", choices=dict(text=["a", "b"], label=["A", "B"]), answerKey="B"),
        "piqa": dict(goal="def", sol1="x", sol2="y", label=0), "mmlu": letters, "mmlu.dev": letters,
    }.items():  # fmt: skip
        Path("items").mkdir(exist_ok=True)
        Path(f"items/{name}.jsonl").write_text((json.dumps(item) + "\n") * 6)


def words_of(command: str) -> list[str]:
    """As the shell splits them: variables, braces, ~ and comments. Token counts become tiny."""
    script = "printf '%s\\0' " + command.removeprefix("python ")
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    if words[0] == "fit.py":
        return words
    shrink = lambda word: str(max(256, round(float(word) / 256_000) * 256))
    words = [shrink(w) if flag.endswith("_tokens") and w[0].isdigit() else w for flag, w in zip(["", *words], words)]
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
            argv += [f"--data={corpus_path}", "--workers=1", "--device=cpu"]
            argv += ["--dry_run"] * ("--widths" in argv)
        if file in ("train.py", "eval.py"):
            argv += ["--device=cpu"]
        with monkeypatch.context() as there:
            if file == "fit.py" and "--curves" not in argv:
                there.chdir("fits")
            status = import_module(file.removesuffix(".py")).main(argv)
        assert status == 0, f"{command}\n{capsys.readouterr().err[-500:]}"
