"""The tasks against lm-evaluation-harness: its own definitions and model class, over the same items and weights."""

import itertools
import json
import logging
import random
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import harness
import pytest
import torch
from test_mistakes import one_line
from test_tokenizer import train_tokenizer

import data
import eval as evaluation
import model as model_file
from tools import tasks
from tools.tasks import TASKS
from model import GPT, GPTConfig

ROOT = Path(__file__).parent.parent
MAX_LEN = 320
GROUPS = defaultdict(lambda: [""], mmlu=["abstract_algebra", "anatomy", "virology"], math=["Algebra", "Geometry"])
SCORED = [name for name in TASKS if not TASKS[name].program]  # the harness cannot load the other two offline


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    """A small model that prefers some texts over others, and writes now and then what a task looks for."""
    folder = tmp_path_factory.mktemp("exported")
    words = [json.dumps(doc, ensure_ascii=False) for docs in harness.items().values() for doc in docs]
    train_tokenizer(folder / "tokenizer.json", words, vocab_size=600)
    tokenizer = data.load_tokenizer(str(folder / "tokenizer.json"))
    torch.manual_seed(1)
    model = GPT(GPTConfig(n_layer=2, n_embd=64, n_head=4, n_kv_head=2, seq_len=MAX_LEN, vocab_size=608, base_width=32))
    ids = tokenizer.encode_ordinary("".join(text for text in written_texts()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        start = torch.randint(len(ids) - 65, (8,), generator=torch.Generator().manual_seed(step)).tolist()
        rows = torch.tensor([ids[s : s + 65] for s in start])
        model(rows[:, :-1], rows[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    model_file.export_granite(model.eval(), folder / "granite", tokenizer.eot_token, data.tokenizer_files(tokenizer))
    return folder / "granite"


def written_texts() -> list[str]:
    rng = random.Random(3)
    return [
        f"Question: {harness.text(rng)}\nAnswer: {harness.text(rng)} #### {rng.choice(['1,200', '$7', '5.'])}\n\nProblem: {harness.text(rng)}\nAnswer: so $x=\\frac12$ and $5$\n\n"
        for _ in range(60)
    ]


@pytest.fixture(scope="session")
def model(exported) -> GPT:
    return model_file.load_model(exported)


@pytest.fixture(scope="session")
def tokenizer(exported):
    return data.tokenizer_of(exported)


@pytest.fixture(scope="session")
def files():
    return harness.items()


@pytest.fixture(scope="session")
def folder(files, tmp_path_factory) -> Path:
    return harness.write(tmp_path_factory.mktemp("items") / "items", files)


@pytest.fixture(scope="session")
def theirs(exported, files):
    """shots -> the harness's metrics and samples, computed once for all tests."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install -r requirements-dev.txt")
    logging.disable(logging.WARNING)
    model, results = harness.harness_model(exported, MAX_LEN), {}
    for shots in (0, 2):
        pairs = [(name, group) for name in SCORED for group in GROUPS[name]]
        results[shots] = harness.run_harness(model, files, pairs, defaultdict(lambda: shots, wikitext=0))
    logging.disable(logging.NOTSET)
    return results


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """As in `harness`, which checks the real lengths."""
    assert {name: task.max_new_tokens for name, task in TASKS.items() if task.stops} == harness.WRITTEN
    for name in harness.WRITTEN:
        monkeypatch.setitem(TASKS, name, TASKS[name]._replace(max_new_tokens=harness.SHORT))


def run(name, folder, model, tokenizer, shots=0, max_len=MAX_LEN):
    questions = tasks.questions_of(name, folder, shots)
    answers = evaluation.answer(name, questions, model, tokenizer, max_len)
    return questions, answers, tasks.measure(name, questions, answers)


@pytest.mark.parametrize("name, shots", [(name, shots) for name in SCORED for shots in (0, 2) if name != "wikitext" or shots == 0])
def test_numbers_are_the_harnesses(name, shots, theirs, folder, model, tokenizer):
    questions, answers, result = run(name, folder, model, tokenizer, shots)
    metrics, samples = theirs[shots]
    for group in GROUPS[name]:
        mine = [(question, answer) for question, answer in zip(questions, answers) if group == question.group]
        # a sample appears once for each filter of its task
        by_doc = {sample["doc_id"]: sample for sample in samples[name, group]}
        assert len(mine) == len(by_doc)
        for i, (question, answer) in enumerate(mine):
            asked, said = by_doc[i]["arguments"], by_doc[i]["resps"]
            if name == "wikitext":
                assert asked[0][0] == question.choices[0]
                assert answer == pytest.approx(said[0][0], abs=1e-4, rel=1e-6)
            elif TASKS[name].stops:
                assert asked[0][0] == question.contexts[0]
                assert answer == said[0][0]
            else:
                assert [tuple(pair) for pair in asked] == [(c, f" {choice}") for c, choice in zip(question.contexts, question.choices)]
                assert answer == pytest.approx([one[0][0] for one in said], abs=1e-4)
    compare_metrics(name, result, {group: metrics[name, group] for group in GROUPS[name]})


def compare_metrics(name: str, ours: dict, theirs: dict[str, dict]) -> None:
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    spelled = {"exact_match": "exact_match,none" if name == "math" else "exact_match,strict-match", "exact_match_flexible": "exact_match,flexible-extract"}
    compared = [metric for metric in ours if f"{metric}_stderr" in ours]
    assert TASKS[name].metric in compared
    for metric in compared:
        key = spelled.get(metric, f"{metric},none")
        value, stderr = (list(group[which] for group in theirs.values()) for which in (key, key.replace(",", "_stderr,")))
        sizes = [{"mmlu": 4, "math": 3}.get(name, 0)] * len(value)
        if len(value) > 1:  # as its groups of tasks do it
            value, stderr = [aggregate_subtask_metrics(value, sizes)], [pooled_sample_stderr(stderr, sizes)]
        assert ours[metric] == pytest.approx(value[0], rel=1e-6, abs=1e-6), metric
        if ours[f"{metric}_stderr"] is not None:
            assert ours[f"{metric}_stderr"] == pytest.approx(stderr[0], abs=1e-6), metric


def test_the_items_tell_right_from_wrong(folder, model, tokenizer):
    """Else the comparison above would compare zeros with zeros."""
    results = {name: run(name, folder, model, tokenizer)[2] for name in SCORED}
    assert sum(0 < result.get("acc", 0) < 1 for result in results.values()) >= 6
    assert sum(result.get("acc") != result.get("acc_norm", result.get("acc")) for result in results.values()) >= 2


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
@pytest.mark.parametrize("shots", [0, 3])
def test_code_prompts_stops_and_cut_off_outputs(name, shots, exported, files, folder, model, tokenizer, monkeypatch, tmp_path):
    evaluate = pytest.importorskip("evaluate", reason="comes with lm-evaluation-harness: pip install -r requirements-dev.txt")

    class Nothing:  # the harness downloads the scorer, and tries it, when it loads these tasks
        compute = staticmethod(lambda **_: ({"pass@1": 0.0}, {}))

    monkeypatch.setattr(evaluate, "load", lambda *_: Nothing)
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    if name == "humaneval" and shots:
        return
    if name == "mbpp":  # the harness has its three examples in its own code
        import importlib

        examples = importlib.import_module("lm_eval.tasks.mbpp.utils").list_fewshot_samples()
        harness.write(tmp_path / "items", {"mbpp": files["mbpp"], "mbpp.train": examples})
        folder = tmp_path / "items"
    logging.disable(logging.WARNING)
    _, samples = harness.run_harness(harness.harness_model(exported, MAX_LEN), {name: files[name]}, [(name, "")], {name: shots})
    logging.disable(logging.NOTSET)
    questions = tasks.questions_of(name, folder, shots)
    answers = evaluation.answer(name, questions, model, tokenizer, MAX_LEN)
    for sample, question, text in zip(samples[name, ""], questions, answers, strict=True):
        assert sample["arguments"][0][0] == question.contexts[0]
        assert sample["arguments"][0][1]["until"][: len(TASKS[name].stops)] == list(TASKS[name].stops)
        assert sample["resps"][0][0] == text


# -- without the harness -----------------------------------------------------------------------------


def plain(model: GPT, ids: list[int], n: int) -> float:
    """One request, one forward pass, no cache, no batch."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return sum(log_p[len(ids) - 2 - k, ids[len(ids) - 1 - k]].item() for k in range(n))


@pytest.mark.parametrize("experts", [0, 4])
def test_scores_depend_on_nothing_but_the_request(experts):
    """Not on the batch, what else the item asks, or what the batch has in common."""
    torch.manual_seed(0)
    mixture = dict(n_expert=4, n_expert_active=2, n_ffn=40) if experts else {}
    model = GPT(GPTConfig(n_layer=2, n_embd=32, n_head=4, seq_len=64, vocab_size=50, init_std=0.2, **mixture)).eval()
    rng = random.Random(0)
    some = lambda n: [rng.randrange(50) for _ in range(n)]
    shared, items = some(12), []
    for k in range(24):
        context = (shared if k % 3 else []) + some(rng.randrange(1, 20))
        choices = [some(rng.randrange(1, 6)) for _ in range(rng.randrange(1, 5))] + [[7], [8]] * (k % 2)
        items.append([((context + choice), len(choice)) for choice in choices])
    items += [[([3, 4], 1), ([3, 5], 1)], [(some(65), 64)], [(some(30), 4)], [(shared + [1], 1)] * 2]
    expected = [[plain(model, *request) for request in item] for item in items]
    for batch_tokens in (1, 60, 300, 10**6):
        found = evaluation.in_batches(lambda b: evaluation.score(model, b), items, batch_tokens)
        for a, b in zip(found, expected, strict=True):
            assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    grouped = evaluation.in_batches(lambda b: evaluation.score(model, b), items, 10**6, groups=[str(i % 3) for i in range(len(items))])
    assert all(a == pytest.approx(b, rel=1e-5, abs=1e-5) for a, b in zip(grouped, expected, strict=True))


def test_what_a_batch_has_in_common_is_read_once(model, monkeypatch):
    read = []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, cache=None: (read.append(idx.numel()), hidden(idx, cache))[1])
    shots, contexts = list(range(100)), [[200 + i] * 20 for i in range(5)]
    evaluation.score(model, [[(shots + context + [300 + j] * 4, 4) for j in range(4)] for context in contexts])
    assert read == [100, 5 * 19, 5 * 4 * 4]  # the context's last token predicts a choice's first, the choice's last is not read
    read.clear()
    evaluation.score(model, [[(shots + context + [300 + j], 1) for j in range(4)] for context in contexts])
    assert sum(read) == 100 + 5 * 20  # letters: a single row for the four


def test_rolling_windows():
    R = lambda ids, eot, m: tasks.rolling_windows(type('T', (), {'eot_token': eot, 'encode_ordinary': lambda self, x: x})(), ids, m)
    assert R(list(range(1, 11)), 0, 4) == [([0, 1, 2, 3, 4], 4), ([4, 5, 6, 7, 8], 4), ([6, 7, 8, 9, 10], 2)]
    assert R([1, 2], 0, 4) == [([0, 1, 2], 2)] and R([], 0, 4) == []


def test_completions_are_the_dumb_loops(model):
    """Prompts of different lengths in one batch, each ended at its own time."""
    prompts = [[5] * 3, [9, 8, 7, 6, 5], [1], [2] * 40, [17, 300]]
    finished = lambda new: sum(new) % 7 == 0

    def alone(prompt):
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + 20 and (len(ids) == len(prompt) or not finished(ids[len(prompt) :])):
                ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
        return ids[len(prompt) :]

    expected = [alone(prompt) for prompt in prompts]
    assert len({len(new) for new in expected}) > 1
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2]):
        assert evaluation.complete(model, [prompts[i] for i in order], lambda new: len(new) == 20 or finished(new)) == [expected[i] for i in order]


def test_stops_are_found_wherever_they_fall(tokenizer, monkeypatch):
    """Across tokens, inside a token, in a broken character."""
    text = "a naïve b€ c Question: and more </s> text"
    ids = [byte for byte in text.encode()]
    bytewise = data.load_tokenizer("bytes")
    script = iter(ids)

    class Scripted:
        cfg = GPTConfig(n_layer=1, n_embd=8, n_head=1, seq_len=8, vocab_size=260)

    written = []

    def complete(model, prompts, most, finished):
        for i in script:
            written.append(i)
            if finished(written):
                break
        return [written]

    monkeypatch.setattr(evaluation, "complete", complete)
    assert evaluation.write(Scripted, bytewise, ["x"], ("Question:", "</s>"), 99, 200) == ["a naïve b€ c "]
    assert bytes(written).endswith(b"Question:")
    script, written[:] = iter([*"x€".encode()[:2], 255, 65]), []
    assert evaluation.write(Scripted, bytewise, [""], ("never",), 99, 200) == ["x\ufffd"]  # up to end-of-text


def test_math_answers_are_normalized_as_the_harness_does():
    utils = pytest.importorskip("lm_eval.tasks.hendrycks_math.utils", reason="lm-evaluation-harness is not installed")
    parts = ["\\frac", "\\dfrac", "\\sqrt", "{", "}", "1", "2", "x", "=", "/", " ", ".", "0.5", "\\text{ cm}", "\\$", "\\%", "^\\circ", "\\left(", "\\right)", "$", "\n", "\\!", "a"]
    rng = random.Random(0)
    known = ["", "0.5", "\\frac12", "\\frac1{72}", "\\frac{1}{2}", "1/2", "x=1/2", ".5", "3/4", "x/y", "\\sqrt3", "5\\text{ m}", "12\\%", "\\frac\\sqrt32", "1/2/3", "\\frac", "x="]
    texts = known + ["".join(rng.choices(parts, k=rng.randint(1, 7))) for _ in range(3000)]
    for text, gold in itertools.chain(itertools.product(known, known), zip(texts, rng.sample(texts, len(texts))), zip(texts, texts)):
        doc = {"solution": f"\\boxed{{{gold}}}"}
        try:
            expected = utils.process_results(doc, [text])["exact_match"]
        except (AssertionError, TypeError):  # braces that do not match
            continue
        if utils.last_boxed_only_string(doc["solution"]) == doc["solution"]:
            assert tasks.grade_math(doc, text) == {"exact_match": bool(expected)}, (text, gold)
    for solution in ("so \\boxed{\\frac{1}{\\sqrt{2}}}.", "\\boxed{1} then \\boxed{2}", "$\\boxed 7$ is", "\\boxed{1}, \\boxed 7"):
        assert tasks.boxed(solution) == utils.remove_boxed(utils.last_boxed_only_string(solution))


def test_numbers_are_found_and_compared_as_the_harness_does(files):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    config = harness.harness_task("gsm8k", files)
    (metric,), (strict, flexible) = config["metric_list"], [RegexFilter(**{k: v for k, v in f["filter"][0].items() if k != "function"}) for f in config["filter_list"]]
    rules = {k: v for k, v in metric.items() if k not in ("metric", "aggregation", "higher_is_better")}
    rng = random.Random(0)
    parts = ["#### ", "####", " ", "-", "5", "1,200", "$", "7.", ".", "12.50", "\n", "words", "A", ",", "#### 3", "-2"]
    texts = ["".join(rng.choices(parts, k=rng.randint(0, 8))) for _ in range(2000)]
    hits = 0
    for text in texts:
        doc = {"answer": f"so {rng.choice(texts)} #### {rng.choice(['5', '1,200', '-2', '$7.', '12.50', '3'])}"}
        ours = tasks.grade_gsm8k(doc, text)
        for name, regex in (("exact_match", strict), ("exact_match_flexible", flexible)):
            found = regex.apply([[text]], [doc])[0][0]
            assert ours[name] == bool(exact_match_hf_evaluate([found], [doc["answer"]], **rules)["exact_match"]), (text, doc, name)
        hits += sum(ours.values())
    assert hits > 100


def test_pages_are_detokenized_as_the_harness_does():
    utils = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext", reason="lm-evaluation-harness is not installed")
    parts = [" @-@ ", " @,@ ", " @.@ ", " : ", " . ", "! ", " ? ", "( ", " )", "[", " ] ", '" ', "'", " 's", "s '", "= =", " = = = ", " ° ", "\n", " N ", "word", "7", "/' 3/", " { ", "}", " "]
    rng = random.Random(0)
    for _ in range(3000):
        page = "".join(rng.choices(parts, k=rng.randint(1, 25)))
        assert tasks.detokenize(page) == utils.wikitext_detokenizer({"page": page}), page


@pytest.mark.parametrize(
    "row",
    [  # arc, boolq, hellaswag, openbookqa, piqa, winogrande, average
        (44.6, 63.5, 63.6, 37.6, 75.3, 61.3, 57.7), (43.0, 62.8, 64.8, 38.0, 74.5, 62.1, 57.6), (44.3, 65.6, 64.6, 37.0, 76.0, 61.8, 58.2),
        (40.6, 63.6, 59.7, 35.2, 74.0, 57.2, 55.1), (43.9, 59.7, 61.0, 34.4, 76.0, 59.3, 55.7), (44.0, 60.4, 61.6, 36.0, 74.8, 58.3, 55.9),
        (50.6, 77.7, 71.5, 39.8, 77.0, 64.4, 63.5), (65.0, 72.8, 73.0, 41.4, 79.2, 68.9, 66.7), (60.5, 72.0, 74.6, 43.6, 79.9, 70.0, 66.8),
        (47.1, 66.3, 60.9, 34.2, 74.0, 60.8, 57.2), (48.1, 72.5, 65.4, 36.4, 75.3, 66.2, 60.7), (59.9, 66.1, 65.6, 42.0, 75.7, 60.5, 61.7),
        (58.1, 65.0, 71.5, 41.0, 79.1, 65.0, 63.3),
    ],
)  # fmt: skip
def test_the_papers_averages(row):
    """Tables 5 and 6."""
    arc, *columns, average = row
    results = {name: {"acc": -1.0} | {TASKS[name].metric: value} for name, value in zip(tasks.AVERAGED, [arc + 7, arc - 7, *columns], strict=True)}
    assert tasks.paper_average(results) == pytest.approx(average, abs=0.1)
    assert tasks.paper_average({name: results[name] for name in list(results)[1:]}) is None


# -- the command line -----------------------------------------------------------------------------------


def test_results_as_a_table_and_as_json(exported, folder, tmp_path, capsys):
    tasks = ",".join([*tasks.AVERAGED, "wikitext"])
    argv = ["--model", str(exported), "--tasks", tasks, "--data", str(folder), "--out", "scores.json", "--device", "cpu"]
    assert evaluation.main(argv) == 0
    out, scores = capsys.readouterr().out, json.loads(Path("scores.json").read_text())
    assert list(scores) == [*tasks.split(","), "paper_average"]
    for name in tasks.split(","):
        metric, result = TASKS[name].metric, scores[name]
        assert result["n"] == (5 if name == "wikitext" else 12) and result["num_fewshot"] == 0 and result["max_len"] == MAX_LEN
        assert result[metric] > 0 or metric != "word_perplexity"
        assert (result[f"{metric}_stderr"] is None) == (name == "wikitext")
        assert re.search(rf"^{name} +{result['n']} +0 +{MAX_LEN} +\*{metric} +{result[metric]:.4f}", out, re.M), name
    assert "per character" in scores["piqa"]["rule"] and f"{scores['paper_average']['average']:.4f}" in out
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


def test_flags(exported, folder, capsys):
    base = ["--model", str(exported), "--tasks", "piqa", "--data", str(folder), "--out", "scores.json", "--device", "cpu"]
    assert evaluation.main([*base, "--limit", "3", "--num_fewshot", "2", "--max_len", "100", "--dtype", "bfloat16", "--batch_tokens", "50"]) == 0
    result = json.loads(Path("scores.json").read_text())["piqa"]
    assert (result["n"], result["num_fewshot"], result["max_len"], result["dtype"]) == (3, 2, 100, "bfloat16")
    assert evaluation.main(["--model", str(exported), "--prompt", "Question:", "--max_new_tokens", "5", "--device", "cpu"]) == 0
    assert "Question:" in capsys.readouterr().out


def test_processes_share_the_items(exported, folder, tmp_path):
    """Two processes under torchrun write what one writes."""
    argv = ["--model", exported, "--tasks", "arc_easy,mmlu,wikitext", "--data", folder, "--num_fewshot", "1", "--device", "cpu", "--out"]
    assert evaluation.main([str(word) for word in [*argv, "one.json"]]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "eval.py"]
    done = subprocess.run([*torchrun, *argv, tmp_path / "two.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    assert done.stdout.count("arc_easy") == 2 and one.keys() == two.keys()
    for name, result in one.items():
        numbers = lambda some: {k: v for k, v in some.items() if isinstance(v, float)}
        assert numbers(result) and numbers(result) == pytest.approx(numbers(two[name]), rel=1e-6)


WRONG = [  # file, its content, what the line names
    ("piqa.jsonl", None, "piqa.jsonl: no such file"), ("piqa.jsonl", "", "piqa.jsonl: is empty"),
    ("piqa.jsonl", '{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n{"goal": \n', "piqa.jsonl, line 2"),
    ("piqa.jsonl", '{"goal": "a", "sol1": "b", "label": 0}\n', "line 1: not an item"), ("piqa.jsonl", "[1]\n", "line 1: not an item"), ("piqa.jsonl", "7\n", "line 1: not an item"),
    ("piqa.jsonl", '{"goal": "a", "sol1": "b", "sol2": 3, "label": 0}\n', "line 1: not an item"), ("piqa.jsonl", '{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}\n', "line 1: not an item"),
    ("piqa.jsonl", '{"goal": "a", "sol1": "b", "sol2": "c", "label": -1}\n', "line 1: not an item"),
    ("piqa.jsonl", '{"goal": "a", "sol1": "b", "sol2": "c", "label": null}\n', "line 1: not an item"), ("piqa.jsonl", b"\xff\xfe\n", "line 1"),
    ("arc_easy.jsonl", '{"question": "a", "choices": {"text": ["b"], "label": ["A"]}, "answerKey": "B"}\n', "line 1: not an item"),
    ("winogrande.jsonl", '{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}\n', "line 1: not an item"),
    ("mmlu.jsonl", '{"question": "a", "choices": ["b", "c", "d"], "answer": 0, "subject": "x"}\n', "line 1: not an item"),
    ("mmlu.jsonl", '{"question": "a", "choices": ["b", "c", "d", "e"], "answer": 0}\n', "subject"),
    ("mmlu.jsonl", '{"question": "a", "choices": ["b", "c", "d", "e"], "answer": 0, "subject": "x"}\n', "mmlu.dev.jsonl: no such file"),
    ("hellaswag.jsonl", '{"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d"], "label": ""}\n', "line 1: not an item"),
    ("humaneval.jsonl", '{"prompt": "a", "test": "b", "entry_point": "c"}\n', "line 1: not an item of humaneval (lacks 'task_id')"),
    ("humaneval.jsonl", '{"task_id": "a", "prompt": "b", "entry_point": "c"}\n', "lacks 'test'"), ("mbpp.jsonl", '{"task_id": 1, "text": "a", "code": "b", "test_list": ["c"]}\n', "line 1"),
    ("math.jsonl", '{"problem": "a", "solution": "none", "type": "Algebra"}\n', "boxed"),
]  # fmt: skip


@pytest.mark.parametrize("file, content, says", WRONG)
def test_wrong_items_are_named_in_one_line(file, content, says, exported, tmp_path, capsys):
    if content is not None:
        Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.iterdir())
    error = one_line(evaluation.main, ["--model", str(exported), "--tasks", file.split(".")[0], "--data", ".", "--out", "x.json", "--device", "cpu"], capsys)
    assert says in error and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--tasks", "piqa,nonsense"], "nonsense"), (["--tasks", ""], "--tasks"), (["--max_len", "9999"], "--max_len 9999"), (["--max_len", "0"], "--max_len 0"),
        (["--limit", "0"], "--limit 0"), (["--num_fewshot", "-1"], "--num_fewshot"), (["--num_fewshot", "12"], "needs 13 examples"), (["--dtype", "int8"], "--dtype"),
        (["--out", "no/such/folder.json"], "--out"), (["--out", "."], "--out"), (["--max_len", "24", "--tasks", "gsm8k"], "leaves no room"), (["--batch_tokens", "0"], "--batch_tokens"),
        (["--data", "nowhere"], "nowhere"), (["--model", "nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_wrong_flags(argv, says, exported, folder, tmp_path, capsys):
    base = {"--model": str(exported), "--tasks": "piqa", "--data": str(folder), "--device": "cpu"} | dict(zip(argv[::2], argv[1::2]))
    assert says in one_line(evaluation.main, [word for pair in base.items() for word in pair], capsys)
    assert not list(tmp_path.iterdir())


def test_without_a_network_the_folder_has_to_be_named(exported, capsys):
    error = one_line(evaluation.main, ["--model", str(exported), "--tasks", "piqa", "--device", "cpu"], capsys)
    assert "--data" in error and "piqa.jsonl" in error


@pytest.mark.parametrize("name", TASKS)
def test_downloads_are_the_harness_data_sets(name, monkeypatch):
    """Its repositories, configurations and splits, by its own definitions."""
    loader = pytest.importorskip("lm_eval.tasks._yaml_loader", reason="lm-evaluation-harness is not installed: pip install -r requirements-dev.txt")
    tasks, asked = Path(loader.__file__).parent, []
    group = {"mmlu": "anatomy", "math": "algebra"}.get(name, "")
    theirs = loader.load_yaml(tasks / f"{harness.HARNESS_FILES[name][0].format(group)}.yaml", resolve_func=False)

    class Hub:
        get_dataset_config_names = staticmethod(lambda repo: ["algebra"])

        def load_dataset(repo, config, split):
            asked.append((repo, config, split))
            return [{"task_id": i} for i in range(1, 11)]

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    splits = [theirs.get("test_split") or theirs["validation_split"], theirs.get("fewshot_split") or theirs.get("training_split")]
    for examples, split in enumerate(splits if splits[1] and name != "wikitext" else splits[:1]):
        items = tasks.read_items(name, None, bool(examples))
        assert items[9] == (f"{name}{'.dev' if name == 'mmlu' else '.train'}.jsonl, item 10" if examples else f"{name}.jsonl, item 10", {"task_id": 10})
        repo, config, ours = asked.pop()
        assert (repo, ours) == (theirs["dataset_path"], split)
        assert config == theirs.get("dataset_name") or config in ("default", "openai_humaneval") or (name, config) == ("mmlu", "all")
    if name == "mbpp":  # the harness has its examples in its own code: these rows of this split, which holds task_id 1 to 10
        tasks.read_items(name, None, True)
        written_there = re.findall(r'"task_id": (\d+)', (tasks / "mbpp" / "utils.py").read_text())
        assert asked == [("google-research-datasets/mbpp", "full", "prompt[1:]")] and written_there == ["2", "3", "4"]


# -- a command, not part of the suite --------------------------------------------------------------------


@pytest.mark.slow
def test_speed_beside_the_harness(tmp_path):
    """Multiple choice on a CPU: the harness's `hf` model class and ours, the same model and items, by turns.

    Seconds of processor time, with one thread: a machine that has other things to do does not disturb them.
    """
    import time

    rng = random.Random(0)
    words = [json.dumps(doc, ensure_ascii=False) for docs in harness.items().values() for doc in docs]
    train_tokenizer(tmp_path / "tokenizer.json", words, vocab_size=600)
    tokenizer = data.load_tokenizer(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=4, n_embd=128, n_head=4, seq_len=1024, vocab_size=8192)).eval()
    model_file.export_granite(model, tmp_path / "granite", tokenizer.eot_token, data.tokenizer_files(tokenizer))
    question = lambda i: {"question": harness.text(rng, 10, 40), "choices": {"text": [harness.text(rng, 1, 12) for _ in "ABCD"], "label": list("ABCD")}, "answerKey": "A"}
    files = {"arc_easy": [question(i) for i in range(32)], "arc_easy.train": [question(i) for i in range(12)]}
    files["piqa"] = [{"goal": harness.text(rng, 3, 20), "sol1": harness.text(rng, 5, 20), "sol2": harness.text(rng, 5, 20), "label": 0} for _ in range(32)]
    files["piqa.train"] = files["piqa"]
    subject = lambda i: {"question": harness.text(rng, 10, 40), "subject": "anatomy", "choices": [harness.text(rng, 1, 6) for _ in "ABCD"], "answer": 0}
    files |= {"mmlu": [subject(i) for i in range(16)], "mmlu.dev": [subject(i) for i in range(5)]}
    folder = harness.write(tmp_path / "items", files)
    logging.disable(logging.WARNING)
    theirs = harness.harness_model(tmp_path / "granite", 1024, batch_size=16)
    for name, group, shots in (("arc_easy", "", 0), ("arc_easy", "", 5), ("piqa", "", 0), ("mmlu", "anatomy", 5)):
        times = {"harness": [], "eval.py": []}
        for _ in range(2):
            began = time.process_time()
            harness.run_harness(theirs, files, [(name, group)], {name: shots})
            times["harness"].append(time.process_time() - began)
            began = time.process_time()
            run(name, folder, model, tokenizer, shots, max_len=1024)
            times["eval.py"].append(time.process_time() - began)
        best = {who: min(some) for who, some in times.items()}
        print(f"\n{name}, {shots} shots, {len(files[name])} items: harness {best['harness']:.2f} s, eval.py {best['eval.py']:.2f} s, {best['harness'] / best['eval.py']:.2f} times as fast")
        assert best["eval.py"] <= best["harness"]
    logging.disable(logging.NOTSET)
