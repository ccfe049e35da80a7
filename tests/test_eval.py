"""The scores against lm-evaluation-harness, the losses against plain loops."""

import dataclasses
import json
import math
import random
from pathlib import Path

import harness
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval as evaluation
import model as model_file
import train
from config import make_config
from eval import Request, load_model
from model import GPT
from test_ddp import finish, launch
from test_model import SHAPES, some_tokens, tiny
from test_train import STEP, argv as training_argv, record_of
from tools import files, granite, run_folder, tasks
from tools.prepare import prepare
from tools.tasks import TASKS
from tools.tokenizers import load_tokenizer


# -- The harness -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def items(tmp_path_factory) -> Path:
    """The folder of the items."""
    return harness.write(tmp_path_factory.mktemp("items"), harness.all_items())


@pytest.fixture(scope="module")
def exported(items, tmp_path_factory) -> Path:
    """A Granite folder. Its tokenizer came with a post-processor, which adds a token."""
    folder = tmp_path_factory.mktemp("exported")
    texts = [file.read_text(encoding="utf-8") for file in sorted(items.iterdir())]
    harness.train_tokenizer(folder / "trained.json", texts, size=600)
    tokenizer = load_tokenizer(str(folder / "trained.json"))
    model = tiny(n_kv_head=2, vocab_size=608, seq_len=harness.MAX_LEN)
    granite.write_folder(folder, model, tokenizer)
    return folder


@pytest.fixture(scope="module")
def argv(exported, items) -> list[str]:
    return ["--model", str(exported), "--device", "cpu", "--items", str(items)]


@pytest.fixture(scope="module")
def scores(argv, tmp_path_factory) -> dict:
    """The scores of all tasks."""
    out = tmp_path_factory.mktemp("out") / "new" / "scores.json"
    assert evaluation.main([*argv, "--tasks", ",".join(TASKS), "--out", str(out)]) == 0
    return files.read_json(out)


@pytest.fixture(scope="module")
def theirs(exported) -> tuple[dict, dict]:
    """The metrics and samples of the harness."""
    return harness.run_harness(exported, list(TASKS))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_equals_the_harness(name, theirs, exported, items, scores):
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    # 1. Its texts and their likelihoods
    model = load_model(exported)
    tokenizer = load_tokenizer(model.run["tokenizer"])
    ours = tasks.read_task(name, items, None)
    if name == "mmlu":  # the harness has a task for each subject
        ours.sort(key=lambda question: question.subject)
    samples = []
    for subject in theirs[1][name]:
        samples += sorted(subject, key=lambda sample: sample["doc_id"])
    for item, sample in zip(ours, samples, strict=True):
        texts = [tuple(pair) for pair in sample["arguments"]]
        log_p = [response[0] for response in sample["resps"]]
        if name == "wikitext":
            page = tasks.detokenize(item)
            assert texts == [(page,)]
            requests = evaluation.rolling_windows(tokenizer, page, harness.MAX_LEN)
            found = [sum(evaluation.score(model, list(requests)))]
        else:
            choices = [f" {choice}" for choice in item.choices]
            assert texts == list(zip(item.contexts, choices))
            requests = evaluation.requests_of(tokenizer, item, harness.MAX_LEN)
            found = evaluation.score(model, list(requests))
            log_p = [pair[0] for pair in log_p]
        assert found == pytest.approx(log_p, rel=1e-5, abs=1e-4)

    # 2. Its metrics
    expected = theirs[0][name]  # of every subject
    sizes = [12 // len(expected)] * len(expected)
    reported = [key for key in expected[0] if key.endswith(",none")]
    for metric in (key.removesuffix(",none") for key in reported):
        values = [of_subject[f"{metric},none"] for of_subject in expected]
        combine = aggregate_subtask_metrics
        if metric.endswith("_stderr"):
            combine = pooled_sample_stderr
        if values != ["N/A"]:  # no error of a perplexity
            assert scores[name][metric] == pytest.approx(combine(values, sizes)), metric
    assert {f"{metric},none" for metric in TASKS[name][1]} <= set(reported)


def test_pages_are_detokenized_as_in_the_harness():
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    rng = random.Random(0)
    parts = """ @-@ | @,@ | @.@ | : | . |! | ? |( | )|[| ] |" |'| 's|s '|= =| = = = | ° | N |7|
|word|/' 3/| { |}| """.split("|")
    for _ in range(2000):
        page = "".join(rng.choices(parts, k=rng.randint(1, 25)))
        assert tasks.detokenize(page) == wikitext_detokenizer({"page": page}), page


# -- Scores ------------------------------------------------------------------------------


@torch.no_grad()
def one_pass(model: GPT, request: Request) -> float:
    """The score of a request from a pass of its own."""
    ids = request.ids
    log_p = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return sum(log_p[i - 1, ids[i]].item() for i in range(len(ids) - request.n, len(ids)))


def test_a_score_depends_only_on_its_request(monkeypatch):
    model = tiny(vocab_size=50, seq_len=64)
    rng = random.Random(0)
    requests = [Request([3, 4], 1), Request([3, 5], 1)]
    requests.append(Request(rng.choices(range(50), k=65), 64))  # a full window
    for _ in range(20):
        context = rng.choices(range(50), k=rng.randint(1, 40))
        for ending in ([7], [8], rng.choices(range(50), k=rng.randint(1, 20))):
            requests.append(Request(context + ending, len(ending)))
    monkeypatch.setattr(train, "tokens_per_pass", lambda model: 60)
    found = evaluation.score(model, requests)
    expected = [one_pass(model, request) for request in requests]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_questions_that_do_not_fit_are_counted(argv):
    short = {"goal": "a", "sol1": "b", "sol2": "c", "label": 0}
    long = short | {"goal": " word" * 99}
    harness.write(Path("long"), {"piqa": [short, long]})
    flags = "--tasks piqa --items long --max_len 20 --out scores.json"
    assert evaluation.main([*argv, *flags.split()]) == 0
    result = files.read_json(Path("scores.json"))["piqa"]
    assert (result["n"], result["n_cut"], result["max_len"]) == (2, 1, 20)


def test_two_processes_share_the_items(argv, scores):
    """The same scores as from one process, and one of the two prints them."""
    argv = [*argv, "--tasks", "arc_easy,wikitext", "--out", "two.json"]
    outputs = finish(launch(2, evaluation.main, argv))
    assert [printed.count("arc_easy") for printed, _ in outputs] == [1, 0]
    for name, result in files.read_json(Path("two.json")).items():
        assert result == pytest.approx(scores[name])


@pytest.mark.parametrize("typed, word", [
    ("--items .", "piqa.jsonl"),
    ("--items other", "sol1"),
    ("--max_len 9999", "--max_len 9999"),
    ("--tasks gsm8k", "gsm8k"),
    ("--model nowhere", "nowhere"),
    ("--model .", "ckpt"),
])  # fmt: skip
def test_a_mistake_is_one_line(typed, word, argv, one_line):
    harness.write(Path("other"), {"piqa": [{"goal": "a"}]})
    flags = [*argv, "--tasks", "piqa", "--out", "scores.json", *typed.split()]
    assert word in one_line(evaluation.main, flags)
    assert not Path("scores.json").exists()


WITHOUT_EFFECT = """--items . | --limit 3 | --max_len 9 | --out x.json | --top_k 3 | --seed 1
--prompt a --limit 3 | --tasks piqa --items . --temperature 0 | --tasks piqa --prompt a
--data x --prompt a | --data x --tasks piqa --items .""".replace("\n", "|").split("|")


@pytest.mark.parametrize("typed", WITHOUT_EFFECT)
def test_a_flag_without_effect_is_refused(typed, one_line):
    error = one_line(evaluation.main, ["--model=nowhere", *typed.split()])
    assert any(f"--{name}" in error for name in typed.replace("--", "").split()[::2])


# -- Loading -----------------------------------------------------------------------------


def write_run(gpt: GPT, out: Path, tokens: int) -> Path:
    cfg = make_config(**dataclasses.asdict(gpt.cfg))
    content = dict(config=dataclasses.asdict(cfg), model=gpt.state_dict(), tokens=tokens)
    file = run_folder.checkpoint_file(out, tokens)
    run_folder.write_checkpoint(file, content | {"optimizer": {}})
    return file


def test_a_run_is_its_newest_checkpoint():
    old, new = tiny(), tiny(**SHAPES["MoE"])
    file = write_run(old, Path("run"), 9)
    write_run(new, Path("run"), 10)
    idx = some_tokens(2, 16)
    loaded = load_model("run")
    assert torch.equal(loaded(idx), new(idx))
    assert loaded.cfg == new.cfg and not loaded.training
    assert loaded.run["tokenizer"] == "bytes"
    assert torch.equal(load_model(file)(idx), old(idx))
    half = load_model("run", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.rope, new.rope)  # stays in float32


# -- Losses and samples ------------------------------------------------------------------


@torch.no_grad()
def test_validation_loss_equals_a_plain_loop(corpus):
    model = tiny(seq_len=32).train()
    losses = train.validation_loss(model, corpus, max_tokens=1000)
    assert model.training

    sequences = np.random.default_rng([0]).permutation((len(corpus.val) - 1) // 32)
    nats = []
    for i in sequences[: 1000 // 32]:
        ids = torch.from_numpy(corpus.val[32 * i : 32 * i + 33].astype(np.int64))
        nats.append(F.cross_entropy(model(ids[None, :-1])[0], ids[1:]).item())
    bits_per_byte = np.mean(nats) / math.log(2) / corpus.meta["bytes_per_token"]
    assert losses["val_loss"] == pytest.approx(np.mean(nats), rel=1e-6)
    assert losses["val_bpb"] == pytest.approx(bits_per_byte, rel=1e-6)


@pytest.fixture(scope="module")
def run(corpus_path, tmp_path_factory) -> Path:
    """A run in bfloat16 on two corpora, which validates on a part of them."""
    folder = tmp_path_factory.mktemp("runs")
    numbers = [f"{i} squared is {i * i}\n" for i in range(2000)]
    prepare(numbers, "bytes", folder / "numbers")
    data = f"{corpus_path}:0.7,{folder}/numbers:0.3"
    fields = dict(total_tokens=2 * STEP, warmup_tokens=0, init_std=0.3, dtype="bfloat16")
    fields |= dict(data=data, final_eval_tokens=2000)
    assert train.main(training_argv(out=folder / "run", **fields)) == 0
    return folder / "run"


def test_the_losses_are_those_of_the_record(run, capsys):
    def printed(model: Path, *flags: str) -> str:
        assert evaluation.main([f"--model={model}", "--device=cpu", *flags]) == 0
        return capsys.readouterr().out

    results = record_of(run)["results"]
    numbers = run.parent / "numbers"
    mean = f"{results['val_loss']:.4f} nats per token, {results['val_bpb']:.4f} bits"
    of_numbers = f"{results[f'val_loss_{numbers}']:.4f} nats per token"
    for path in (run, run_folder.newest_checkpoint(run)):
        text = printed(path)
        assert mean in text and f"{numbers}: {of_numbers}" in text
    (line,) = printed(run, f"--data={numbers}").splitlines()
    assert of_numbers in line


def test_a_sample_continues_the_prompt(run, capsys):
    argv = ["--model", str(run), "--device", "cpu", "--prompt", "def café"]
    texts = []
    for more in ("--seed 1", "--seed 1", "--seed 2", "--temperature 0"):
        assert evaluation.main([*argv, "--max_new_tokens", "20", *more.split()]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    assert all(text.startswith("def café") for text in texts)


def test_text_that_is_not_unicode_becomes_what_data_py_makes_of_it(run, argv, capsys):
    """Bytes of Latin-1, as Python passes them on, and half a pair of UTF-16 in JSON."""
    prompt = "def caf" + b"\xe9".decode(errors="surrogateescape")
    flags = ["--model", str(run), "--device", "cpu", "--prompt", prompt]
    assert evaluation.main([*flags, "--max_new_tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("def caf\ufffd")

    scores = []
    for half in ("\ud83d", "?"):
        item = {"goal": f"a {half}", "sol1": "b", "sol2": half, "label": 0}
        Path("piqa.jsonl").write_text(json.dumps(item))
        Path("wikitext.jsonl").write_text(json.dumps({"page": f"a {half} b"}))
        found = []
        for model in ([], ["--model", str(run)]):  # a tokenizer.json, and bytes
            tasks = "--tasks piqa,wikitext --items . --out scores.json --max_len 32"
            assert evaluation.main([*argv, *model, *tasks.split()]) == 0
            found.append(files.read_json(Path("scores.json")))
        scores.append(found)
    assert scores[0] == scores[1]


def test_mmlu_needs_five_examples_of_every_subject(argv, one_line):
    """As in the harness. With fewer, a score would not be of the same benchmark."""
    items = harness.all_items()
    few = [x for x in items["mmlu.dev"] if x["subject"] == "virology"][:4]
    rest = [x for x in items["mmlu.dev"] if x["subject"] != "virology"]
    for dev, status in ((few + rest, 2), (items["mmlu.dev"], 0)):
        harness.write(Path("few"), {"mmlu": items["mmlu"], "mmlu.dev": dev})
        flags = [*argv, "--tasks=mmlu", "--items=few"]
        if status:
            assert "virology" in one_line(evaluation.main, flags)
        else:
            assert evaluation.main(flags) == 0


def test_a_sample_ends_with_the_document(monkeypatch):
    """The model continues after end-of-text, and has tokens that the tokenizer lacks."""
    model = tiny(vocab_size=300)
    new = torch.tensor([[98, 260, 99, 255, 100]])
    monkeypatch.setattr(model, "generate", lambda idx, *_: torch.cat((idx, new), dim=1))
    assert model_file.sample(model, load_tokenizer("bytes"), "a") == "abc"
