"""The tasks against lm-evaluation-harness: its definitions and model class, our items."""

import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from harness import MAX_LEN
from safetensors.torch import load_file, save_file
from test_tokenizer import train_tokenizer
from test_train import flags

import data
import eval as evaluation
import model as model_file
import train
from config import make_shape
import tasks
from model import GPT, load_model
from test_mistakes import one_line
from tasks import TASKS, Question, Request

ROOT = Path(__file__).parent.parent
groups = lambda name: (
    ["abstract_algebra", "anatomy", "virology"] if name == "mmlu" else [""]
)
CASES = [
    (name, shots) for name in TASKS for shots in (0, 2) if name != "wikitext" or not shots
]


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    """A small model that prefers some texts."""
    folder, rng = tmp_path_factory.mktemp("exported"), random.Random(3)
    docs = itertools.chain(*harness.items().values())
    texts = [json.dumps(doc, ensure_ascii=False) for doc in docs]
    train_tokenizer(folder / "tokenizer.json", texts, size=600)
    pages = [
        f"Question: {harness.text(rng)}\nAnswer: {harness.text(rng)}\n\n"
        for _ in range(120)
    ]
    data.prepare(
        pages, str(folder / "tokenizer.json"), folder / "corpus", val_fraction=0.2
    )
    shape = dict(n_embd=64, n_head=4, n_kv_head=2, vocab_size=608, seq_len=MAX_LEN)
    learning = dict(
        schedule="constant", lr=0.01, batch_size=2, total_tokens=2 * MAX_LEN * 60
    )
    argv = flags(folder / "corpus", out=folder / "run", **shape, **learning)
    assert train.main(argv) == 0
    granite = str(folder / "granite")
    assert model_file.main(["--export", str(folder / "run"), "--to", granite]) == 0
    return folder / "granite"


@pytest.fixture(scope="session")
def model(exported) -> GPT:
    return load_model(exported)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return harness.write(tmp_path_factory.mktemp("items") / "items", harness.items())


@pytest.fixture(scope="session")
def theirs(exported):
    """shots -> the harness's metrics and samples, computed once for all tests."""
    pairs = [(name, group) for name in TASKS for group in groups(name)]
    return {n: harness.run_harness(exported, harness.items(), pairs, n) for n in (0, 2)}


@pytest.fixture
def ask(exported, model):
    """(name, shots, folder) -> the questions of a task, and our answers."""

    def ask(name, shots, folder):
        questions, tokenizer = (
            tasks.questions_of(name, folder, shots),
            data.tokenizer_of(model.run),
        )
        answers, _ = evaluation.answer(name, questions, model, tokenizer, MAX_LEN)
        return questions, answers

    return ask


@pytest.mark.parametrize("name, shots", CASES)
def test_numbers_are_the_harnesses(name, shots, theirs, ask, folder):
    (questions, answers), (metrics, samples) = ask(name, shots, folder), theirs[shots]
    for group in groups(name):
        mine = [(q, answer) for q, answer in zip(questions, answers) if q.group == group]
        # a sample appears once for each filter of its task
        by_doc = {sample["doc_id"]: sample for sample in samples[name, group]}
        assert len(mine) == len(by_doc)
        for i, (question, answer) in enumerate(mine):
            asked, said = by_doc[i]["arguments"], by_doc[i]["resps"]
            if name == "wikitext":
                assert asked[0][0] == question.choices[0]
                assert answer == pytest.approx(said[0][0], abs=1e-4, rel=1e-6)
            else:
                pairs = zip(question.contexts, question.choices)
                assert [tuple(pair) for pair in asked] == [
                    (c, f" {choice}") for c, choice in pairs
                ]
                assert answer == pytest.approx([one[0][0] for one in said], abs=1e-4)
    result = tasks.measure(name, questions, answers)
    compare_metrics(name, result, [metrics[name, group] for group in groups(name)])


def compare_metrics(name: str, ours: dict, theirs: list[dict]) -> None:
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    compared = [metric for metric in ours if f"{metric}_stderr" in ours]
    assert TASKS[name].metric in compared
    sizes = [4] * 3 if name == "mmlu" else [1]  # items in each group of the task
    for metric in compared:
        key = f"{metric},none"
        value = aggregate_subtask_metrics([group[key] for group in theirs], sizes)
        assert ours[metric] == pytest.approx(value, rel=1e-6, abs=1e-6), metric
        if (ours_stderr := ours[f"{metric}_stderr"]) is not None:
            stderr = [group[key.replace(",", "_stderr,")] for group in theirs]
            stderr = pooled_sample_stderr(stderr, sizes) if len(stderr) > 1 else stderr[0]
            assert ours_stderr == pytest.approx(stderr, abs=1e-6), metric


def plain(model: GPT, ids: list[int], n: int) -> float:
    """One request, one forward pass, no cache, no batch."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return sum(log_p[i - 1, ids[i]].item() for i in range(len(ids) - n, len(ids)))


def test_a_score_depends_only_on_its_request(monkeypatch):
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_embd=32, n_head=4, seq_len=64, vocab_size=50, init_std=0.2)
    model, rng = GPT(make_shape(**shape)).eval(), random.Random(0)
    some = lambda n: [rng.randrange(50) for _ in range(n)]
    requests = [Request([3, 4], 1), Request([3, 5], 1), Request(some(65), 64)]
    for k in range(40):
        context = some(rng.randrange(1, 40))
        endings = [some(rng.randrange(1, 20)), [7], [8]]
        requests += [Request(context + ending, len(ending)) for ending in endings]
    requests += requests[-4:]
    expected = [plain(model, *request[:2]) for request in requests]
    for batch_tokens in (1, 60, 300, 10**6):
        monkeypatch.setattr(evaluation, "tokens_per_pass", lambda model: batch_tokens)
        found = evaluation.score(model, requests)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_equal_inputs_are_read_once():
    shape = dict(n_layer=1, n_embd=32, n_head=4, seq_len=64, vocab_size=50)
    model, read = GPT(make_shape(**shape)).eval(), []
    model.embed.register_forward_hook(lambda _, inputs, output: read.append(output.shape))
    evaluation.score(model, [Request([1, 2, 3, letter], 1) for letter in (5, 6, 7, 8)])
    assert read == [(1, 3, 32)]


class Words:
    """A tokenizer in which a token may span a context and its choice."""

    eot_token = 0

    def encode_ordinary(self, text: str) -> list[int]:
        return [hash_of(word) for word in re.findall(r"one more|\S+", text)]


hash_of = lambda word: 1 + sum(map(ord, word))


def test_a_token_may_span_context_and_choice():
    context, choice = "give me one", "more"
    (request,) = tasks.requests(Words(), Question([context], [choice]), 64)
    assert request.ids == Words().encode_ordinary("give me one more") and request.n == 1
    (request,) = tasks.requests(Words(), Question([""], [""]), 64)
    assert request.ids == [0, 0] and request.n == 1  # no token at all


def test_what_the_window_cuts_and_empty_choices_are_reported(argv, tmp_path, capsys):
    long = " word" * 99
    items = [
        {"goal": "a", "sol1": "b", "sol2": "c", "label": 0},
        {"goal": long, "sol1": "b", "sol2": "c", "label": 0},
        {"goal": "a", "sol1": f"b{long}", "sol2": f"c{long}", "label": 0},
        {"goal": "a", "sol1": "", "sol2": "c", "label": 0},
    ]
    harness.write(Path("long"), {"piqa": items})
    argv += "--tasks piqa --data long --max_len 20 --out scores.json".split()
    assert evaluation.main(argv) == 0
    result = json.loads(Path("scores.json").read_text())["piqa"]
    assert (result["n_cut"], result["n_choices_cut"], result["n_empty"]) == (2, 1, 1)
    out = capsys.readouterr().out
    assert "2 of 4 items are longer" in out and "1 of 4 items have an empty" in out
    assert tasks.main(["piqa", "--data=long"]) == 0
    assert (
        capsys.readouterr().out
        == "Question: a\nAnswer: [b]\n\nQuestion: a\nAnswer: [c]\n\n"
    )


def test_pages_are_detokenized_as_the_harness_does():
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    rng = random.Random(0)
    parts = """ @-@ | @,@ | @.@ | : | . |! | ? |( | )|[| ] |" |'| 's|s '|= =| = = = | ° | N |7|
|word|/' 3/| { |}| """.split("|")
    for _ in range(3000):
        page = "".join(rng.choices(parts, k=rng.randint(1, 25)))
        assert tasks.detokenize(page) == wikitext_detokenizer({"page": page}), page


@pytest.fixture
def argv(exported, folder) -> list[str]:
    return ["--model", str(exported), "--device", "cpu", "--data", str(folder)]


def test_results_are_printed_and_saved(argv, tmp_path, capsys):
    flags = "--limit 3 --max_len 100 --dtype bfloat16 --out scores.json --tasks".split()
    assert (
        evaluation.main([*argv, "--num_fewshot", "2", *flags, "arc_easy,boolq,wikitext"])
        == 0
    )
    out, scores = capsys.readouterr().out, json.loads(Path("scores.json").read_text())
    assert list(scores) == ["arc_easy", "boolq", "wikitext"]
    for name, result in scores.items():
        metric, shots = TASKS[name].metric, 0 if name == "wikitext" else 2
        expected = {"n": 3, "num_fewshot": shots, "max_len": 100, "dtype": "bfloat16"}
        assert result | expected == result and result["rule"] == tasks.RULES[metric]
        assert (result[f"{metric}_stderr"] is None) == (name == "wikitext")
        row = (
            rf"^{name} +{metric} +{result[metric]:.4f} .* n 3, {shots} shots, window 100;"
        )
        assert re.search(row, out, re.MULTILINE), name
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


def test_the_loss_of_a_bfloat16_run_is_the_loss_in_its_record(corpus_path, monkeypatch):
    found, measure = [], evaluation.validation_loss
    assert train.main(flags(corpus_path, dtype="bfloat16", init_std=0.3, out="run")) == 0
    loss = json.loads(Path("run/record.json").read_text())["results"]["val_loss"]
    note = lambda *args: found.append(measure(*args)) or found[-1]
    monkeypatch.setattr(evaluation, "validation_loss", note)
    for argv in ("run", "run/ckpt/0000000000010240.pt", "run --dtype float32"):
        assert evaluation.main(["--device", "cpu", "--model", *argv.split()]) == 0
    losses = [result["val_loss"] for result in found]
    assert losses[:2] == pytest.approx([loss, loss], rel=1e-6)
    assert losses[2] != losses[0]


def test_two_processes_share_the_items(argv, tmp_path):
    argv += ["--tasks", "arc_easy,mmlu,wikitext", "--num_fewshot", "1", "--out"]
    assert evaluation.main([*argv, "one.json"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [
        "--nproc_per_node",
        "2",
        str(ROOT / "eval.py"),
        *argv,
        str(tmp_path / "two.json"),
    ]
    done = subprocess.run(torchrun, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("arc_easy") == 2  # its two metrics, printed by one process
    one, two = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    numbers = lambda result: {k: v for k, v in result.items() if isinstance(v, float)}
    for name in one.keys() | two.keys():
        assert numbers(one[name]) and numbers(one[name]) == pytest.approx(
            numbers(two[name])
        )


ITEM = {"goal": "a", "sol1": "b", "sol2": "c", "label": 0}
WRONG = [  # flags, content of the --tasks file, a part of the error
    ("--tasks piqa --data .", None, "piqa.jsonl: no such file"),
    ("--tasks piqa --data .", json.dumps(ITEM) + "\n{\n", "piqa.jsonl, line 2: not an item"),
    ("--tasks piqa --data .", '{"goal": "a"}', "'sol1'"),
    ("--tasks piqa --data .", json.dumps(ITEM | {"label": 2}), "no choice number 2"),
    ("--tasks piqa --data .", json.dumps(ITEM | {"sol1": 5}), "line 1: not an item of piqa"),
    ("--tasks openbookqa --data .", json.dumps(
        {"question_stem": 5, "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}),
        "5 is not a text"),
    ("--tasks wikitext --data .", '{"page": ""}', "wikitext.jsonl: is empty"),
    ("--tasks gsm8k", None, "lm_eval"), ("--tasks piqa --max_len 9999", None, "--max_len 9999"),
    ("--tasks piqa --num_fewshot 18", None, "needs 19 examples"),
    ("--tasks piqa --out no/such/folder.json", None, "--out no/such"),
    ("--tasks piqa --data=", None, "needs --data"),
]  # fmt: skip


def test_a_perplexity_too_large_for_a_float_is_infinite(argv, capsys):
    """A page that is one long word, after an empty page."""
    pages = [{"page": ""}, {"page": "x" * 3000}]
    harness.write(Path("long"), {"wikitext": pages})
    assert (
        evaluation.main(
            [*argv, *"--tasks wikitext --data long --out scores.json".split()]
        )
        == 0
    )
    assert re.search(r"word_perplexity +inf", capsys.readouterr().out)
    refuse = {"parse_constant": lambda constant: pytest.fail(f"{constant} is not JSON")}
    result = json.loads(Path("scores.json").read_text(), **refuse)["wikitext"]
    assert result["word_perplexity"] is None and 2 < result["bits_per_byte"] < 100


def test_a_model_of_nan_is_not_scored(argv, exported, folder, tmp_path, capsys):
    shutil.copytree(exported, "nan")
    weights = load_file("nan/model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, "nan/model.safetensors", {"format": "pt"})
    argv[1] = "nan"
    corpus = f"--data={exported.parent / 'corpus'}"
    for what in (
        "--tasks=piqa",
        "--tasks=wikitext",
        "--tasks=mmlu",
        "--prompt=x",
        corpus,
    ):
        error = one_line(evaluation.main, [*argv, what], capsys)
        assert "--model nan: its outputs are not numbers" in error


def test_an_empty_sample_says_so(argv, monkeypatch, capsys):
    monkeypatch.setattr(GPT, "generate", lambda self, idx, *_: torch.cat((idx, idx), 1))
    assert evaluation.main([*argv, "--prompt="]) == 0
    assert capsys.readouterr().out == "(the model ended the text at once)\n"


@pytest.mark.parametrize("flags, content, says", WRONG)
def test_errors_are_one_line(flags, content, says, argv, tmp_path, capsys):
    if content is not None:
        Path(f"{flags.split()[1]}.jsonl").write_text(content)
    before = sorted(tmp_path.iterdir())
    argv += ["--out", "scores.json", *flags.split()]
    assert says in one_line(evaluation.main, argv, capsys)
    assert sorted(tmp_path.iterdir()) == before
