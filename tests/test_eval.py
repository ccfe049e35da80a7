"""The scores against lm-evaluation-harness, the losses against plain loops."""

from pathlib import Path

import harness
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval as evaluation
import train
from conftest import STEP, argv, record_of
from eval import load_model
from test_model import tiny
from tools import granite, run_folder, tasks
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
def theirs(exported) -> dict[str, list[tuple]]:
    """The metrics and samples of the harness."""
    return harness.run_harness(exported, list(TASKS))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_equals_the_harness(name, theirs, exported, items):
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    # 1. The likelihoods of its texts
    model = load_model(exported)
    tokenizer = load_tokenizer(model.run["tokenizer"])
    ours = tasks.read_task(name, items)
    if name == "mmlu":  # the harness has a task for each subject
        ours.sort(key=lambda question: question.subject)
    samples = []
    for _, of_subject in theirs[name]:
        samples += sorted(of_subject, key=lambda sample: sample["doc_id"])
    for item, sample in zip(ours, samples, strict=True):
        log_p = [response[0] for response in sample["resps"]]
        if name == "wikitext":
            page = tasks.detokenize(item)
            requests = evaluation.rolling_windows(tokenizer, page, harness.MAX_LEN)
            found = [sum(evaluation.score(model, list(requests)))]
        else:
            requests = evaluation.requests_of(tokenizer, item, harness.MAX_LEN)
            found = evaluation.score(model, list(requests))
            log_p = [pair[0] for pair in log_p]
        assert found == pytest.approx(log_p, rel=1e-5, abs=1e-4)

    # 2. Its metrics, from all items at once
    if name == "wikitext":
        scores = evaluation.perplexities(ours, model, tokenizer)
    else:
        scores = evaluation.accuracies(name, ours, model, tokenizer)
    expected = [metrics for metrics, _ in theirs[name]]  # of every subject
    sizes = [12 // len(expected)] * len(expected)
    for metric, value in scores.items():
        values = [of_subject[f"{metric},none"] for of_subject in expected]
        combine = aggregate_subtask_metrics
        if metric.endswith("_stderr"):
            combine = pooled_sample_stderr
        assert value == pytest.approx(combine(values, sizes)), metric
    reported = {key for key, value in expected[0].items() if value != "N/A"}
    assert {f"{metric},none" for metric in scores} == {k for k in reported if "," in k}


def test_the_program_prints_the_scores(exported, items, theirs, capsys):
    typed = f"--model {exported} --device cpu --items {items} --tasks piqa,wikitext"
    assert evaluation.main(typed.split()) == 0
    metrics, _ = theirs["piqa"][0]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:3] == ["piqa", "acc", f"{metrics['acc,none']:.4f}"]
    assert [line[-1] for line in lines] == ["12", "12"]


@pytest.mark.parametrize("typed, word", [
    ("--items few --tasks mmlu", "mmlu.dev"),  # with fewer examples than the harness
    ("--items .", "piqa.jsonl"),
    ("--tasks gsm8k", "gsm8k"),
    ("--model .", "ckpt"),
])  # fmt: skip
def test_a_mistake_is_one_line(typed, word, exported, one_line):
    files = harness.all_items()
    harness.write(Path("few"), files | {"mmlu.dev": files["mmlu.dev"][:2]})
    line = f"--model {exported} --device cpu --tasks piqa {typed}"
    assert word in one_line(evaluation.main, line.split())


def test_a_secret_answer_is_not_scored():
    """The label in the public test splits of PIQA and HellaSwag."""
    with pytest.raises(ValueError):
        tasks.piqa(harness.piqa(0) | {"label": -1})


# -- Losses and samples ------------------------------------------------------------------


@torch.no_grad()
def test_validation_loss_equals_a_plain_loop(corpus):
    model = tiny(seq_len=32).train()
    loss = train.validation_loss(model, corpus, max_tokens=1000)
    assert model.training

    sequences = np.random.default_rng([0]).permutation((len(corpus.val) - 1) // 32)
    nats = []
    for i in sequences[: 1000 // 32]:
        ids = torch.from_numpy(corpus.val[32 * i : 32 * i + 33].astype(np.int64))
        nats.append(F.cross_entropy(model(ids[None, :-1])[0], ids[1:]).item())
    assert loss == pytest.approx(np.mean(nats), rel=1e-6)


@pytest.fixture(scope="module")
def run(corpus_path, numbers_path, tmp_path_factory) -> Path:
    """A run in bfloat16 on two corpora, which validates on a part of them."""
    run = tmp_path_factory.mktemp("runs") / "run"
    fields = dict(dtype="bfloat16", total_tokens=STEP, warmup_tokens=0)
    fields |= dict(data=f"{corpus_path}:0.7,{numbers_path}:0.3", final_eval_tokens=2000)
    assert train.main(argv(**fields, out=run)) == 0
    return run


def printed(capsys, *typed: str) -> str:
    assert evaluation.main([*typed, "--device=cpu"]) == 0
    return capsys.readouterr().out


def test_the_losses_are_those_of_the_record(run, numbers_path, capsys):
    results = record_of(run)["results"]
    expected = {name: f"{x:.4f}" for name, x in results.items() if name[:4] == "val_"}
    assert len(expected) == 4  # the loss, bits per byte, and the losses of two sources
    for path in (run, run_folder.newest_checkpoint(run)):
        lines = printed(capsys, f"--model={path}").splitlines()[1:]
        assert dict(line.split()[:2] for line in lines) == expected
    line = printed(capsys, f"--model={run}", f"--data={numbers_path}").splitlines()[1]
    assert line.split()[:2] == ["val_loss", expected[f"val_loss_{numbers_path}"]]


def test_a_sample_continues_the_prompt(run, capsys):
    typed = f"--model {run} --max_new_tokens 20 --prompt".split() + ["def café"]
    texts = []
    for more in ("--seed 1", "--seed 1", "--seed 2", "--temperature 0"):
        texts.append(printed(capsys, *typed, *more.split()))
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    assert all(text.startswith("def café") for text in texts)
