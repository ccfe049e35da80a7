"""The tasks against lm-evaluation-harness: its definitions and model class, our items and weights."""

import itertools
import json
import logging
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from test_tokenizer import train_tokenizer

import data
import eval as evaluation
from model import GPT, GPTConfig, load_model
from tools import tasks
from tools.tasks import TASKS

ROOT = Path(__file__).parent.parent
MAX_LEN = 320
GROUPS = {"mmlu": ["abstract_algebra", "anatomy", "virology"], "math": ["Algebra", "Geometry"]}
SCORED = [name for name in TASKS if not TASKS[name].program]
CASES = [(name, shots) for name in SCORED for shots in (0, 2) if name != "wikitext" or not shots]
needs_harness = "lm-evaluation-harness is not installed: pip install -r requirements-dev.txt"


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    """A small model that prefers some texts, and now and then writes what a task looks for."""
    folder, rng = tmp_path_factory.mktemp("exported"), random.Random(3)
    docs = itertools.chain(*harness.items().values())
    texts = [json.dumps(doc, ensure_ascii=False) for doc in docs]
    train_tokenizer(folder / "tokenizer.json", texts, vocab_size=600)
    tokenizer = data.load_tokenizer(str(folder / "tokenizer.json"))
    torch.manual_seed(1)
    shape = dict(n_layer=2, n_embd=64, n_head=4, n_kv_head=2, vocab_size=608, base_width=32)
    model, some = GPT(GPTConfig(seq_len=MAX_LEN, **shape)), lambda: harness.text(rng)
    problem = lambda: f"Problem: {some()}\nAnswer: so $x=\\frac12$ and $5$\n\n"
    number = lambda: rng.choice(["1,200", "$7", "5."])
    question = lambda: f"Question: {some()}\nAnswer: {some()} #### {number()}\n\n"
    ids = tokenizer.encode_ordinary("".join(question() + problem() for _ in range(60)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        rows = torch.tensor([ids[s : s + 65] for s in rng.sample(range(len(ids) - 65), 8)])
        model(rows[:, :-1], rows[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return harness.export(model.eval(), folder / "granite", tokenizer)


@pytest.fixture(scope="session")
def model(exported) -> GPT:
    return load_model(exported)


@pytest.fixture(scope="session")
def tokenizer(exported):
    return data.tokenizer_of(exported)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return harness.write(tmp_path_factory.mktemp("items") / "items", harness.items())


@pytest.fixture(scope="session")
def theirs(exported):
    """shots -> the harness's metrics and samples, computed once for all tests."""
    pytest.importorskip("lm_eval", reason=needs_harness)
    logging.disable(logging.WARNING)
    model = harness.harness_model(exported, MAX_LEN)
    pairs = [(name, group) for name in SCORED for group in GROUPS.get(name, [""])]
    results = {n: harness.run_harness(model, harness.items(), pairs, n) for n in (0, 2)}
    logging.disable(logging.NOTSET)
    return results


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """As in `harness`, which checks the real lengths."""
    written = {name: task.max_new_tokens for name, task in TASKS.items() if task.stops}
    assert written == harness.WRITTEN
    for name in harness.WRITTEN:
        monkeypatch.setitem(TASKS, name, TASKS[name]._replace(max_new_tokens=harness.SHORT))


def run(name, folder, model, tokenizer, shots=0, max_len=MAX_LEN):
    questions = tasks.questions_of(name, folder, shots)
    answers = evaluation.answer(name, questions, model, tokenizer, max_len)
    return questions, answers, tasks.measure(name, questions, answers)


@pytest.mark.parametrize("name, shots", CASES)
def test_numbers_are_the_harnesses(name, shots, theirs, folder, model, tokenizer):
    questions, answers, result = run(name, folder, model, tokenizer, shots)
    metrics, samples = theirs[shots]
    for group in GROUPS.get(name, [""]):
        mine = [(q, answer) for q, answer in zip(questions, answers) if q.group == group]
        # a sample appears once for each filter of its task
        by_doc = {sample["doc_id"]: sample for sample in samples[name, group]}
        assert len(mine) == len(by_doc)
        for i, (question, answer) in enumerate(mine):
            asked, said = by_doc[i]["arguments"], by_doc[i]["resps"]
            if name == "wikitext":
                assert asked[0][0] == question.choices[0]
                assert answer == pytest.approx(said[0][0], abs=1e-4, rel=1e-6)
            elif TASKS[name].stops:
                assert (asked[0][0], said[0][0]) == (question.contexts[0], answer)
            else:
                pairs = zip(question.contexts, question.choices)
                assert [tuple(pair) for pair in asked] == [(c, f" {choice}") for c, choice in pairs]
                assert answer == pytest.approx([one[0][0] for one in said], abs=1e-4)
    compare_metrics(name, result, [metrics[name, group] for group in GROUPS.get(name, [""])])


def compare_metrics(name: str, ours: dict, theirs: list[dict]) -> None:
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    spelled = {"exact_match_flexible": "exact_match,flexible-extract"}
    if name == "gsm8k":
        spelled["exact_match"] = "exact_match,strict-match"
    compared = [metric for metric in ours if f"{metric}_stderr" in ours]
    assert TASKS[name].metric in compared
    for metric in compared:
        key = spelled.get(metric, f"{metric},none")
        value, stderr = [group[key] for group in theirs], ours[f"{metric}_stderr"]
        expected = [group[key.replace(",", "_stderr,")] for group in theirs]
        if len(theirs) > 1:  # as the harness treats its groups of tasks
            sizes = [12 // len(theirs) if name == "mmlu" else 6 // len(theirs)] * len(theirs)
            value = [aggregate_subtask_metrics(value, sizes)]
            expected = [pooled_sample_stderr(expected, sizes)]
        assert ours[metric] == pytest.approx(value[0], rel=1e-6, abs=1e-6), metric
        assert stderr is None or stderr == pytest.approx(expected[0], abs=1e-6), metric


def test_the_items_tell_right_from_wrong(folder, model, tokenizer):
    """Otherwise the comparison above would compare zeros with zeros."""
    results = [run(name, folder, model, tokenizer)[2] for name in SCORED]
    assert sum(0 < result.get("acc", 0) < 1 for result in results) >= 6
    assert sum(result.get("acc") != result.get("acc_norm", result.get("acc")) for result in results) > 1


@pytest.mark.parametrize("name, shots", [("humaneval", 0), ("mbpp", 0), ("mbpp", 3)])
def test_code_is_the_harnesses(name, shots, exported, model, tokenizer, monkeypatch, tmp_path):
    evaluate = pytest.importorskip("evaluate", reason=needs_harness)

    class NoScorer:  # the harness downloads its scorer, and tries it, when it loads these tasks
        compute = staticmethod(lambda **_: ({"pass@1": 0.0}, {}))

    monkeypatch.setattr(evaluate, "load", lambda *_: NoScorer)
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    files = harness.items()
    if name == "mbpp":  # the harness has its three examples in its code
        from lm_eval.tasks.mbpp.utils import list_fewshot_samples

        files["mbpp.train"] = list_fewshot_samples()
    folder = harness.write(tmp_path / "items", files)
    logging.disable(logging.WARNING)
    their_model = harness.harness_model(exported, MAX_LEN)
    _, samples = harness.run_harness(their_model, files, [(name, "")], shots)
    logging.disable(logging.NOTSET)
    questions = tasks.questions_of(name, folder, shots)
    answers = evaluation.answer(name, questions, model, tokenizer, MAX_LEN)
    samples = sorted(samples[name, ""], key=lambda sample: sample["doc_id"])
    for sample, question, text in zip(samples, questions, answers, strict=True):
        prompt, options = sample["arguments"][0]
        assert (prompt, sample["resps"][0][0]) == (question.contexts[0], text)
        assert options["until"][: len(TASKS[name].stops)] == list(TASKS[name].stops)


# -- without the harness -------------------------------------------------------------------------


def plain(model: GPT, ids: list[int], n: int) -> float:
    """One request, one forward pass, no cache, no batch."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return sum(log_p[i - 1, ids[i]].item() for i in range(len(ids) - n, len(ids)))


@pytest.mark.parametrize("experts", [{}, dict(n_expert=4, n_expert_active=2, n_ffn=40)])
def test_a_score_depends_only_on_its_request(experts):
    """Not on the batch, on what else the item asks, or on what the batch has in common."""
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_embd=32, n_head=4, seq_len=64, vocab_size=50, init_std=0.2)
    model, rng = GPT(GPTConfig(**shape, **experts)).eval(), random.Random(0)
    some = lambda n: [rng.randrange(50) for _ in range(n)]
    shared, items = some(30), []
    for k in range(24):
        context = (shared if k % 3 else []) + some(rng.randrange(1, 20))
        choices = [some(rng.randrange(1, 6)) for _ in range(rng.randrange(1, 5))]
        choices += [[7], [8]] * (k % 2)
        items.append([(context + choice, len(choice)) for choice in choices])
    items += [[([3, 4], 1), ([3, 5], 1)], [(some(65), 64)], [(shared + [1], 1)] * 2]
    expected = [[plain(model, *request) for request in item] for item in items]
    for groups in (None, [str(i % 3) for i in range(len(items))]):
        for batch_tokens in (1, 60, 300, 10**6):
            score = lambda batch: evaluation.score(model, batch)
            found = evaluation.in_batches(score, items, batch_tokens, groups)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_what_a_batch_has_in_common_is_read_once(model, monkeypatch):
    read, hidden = [], model.hidden
    count = lambda idx, cache=None: (read.append(idx.numel()), hidden(idx, cache))[1]
    monkeypatch.setattr(model, "hidden", count)
    shots, contexts = list(range(100)), [[200 + i] * 20 for i in range(5)]
    items = [[(shots + context + [300 + j] * 4, 4) for j in range(4)] for context in contexts]
    evaluation.score(model, items)
    # The last token of a context predicts the first of a choice; the last of a choice is not read.
    assert read == [100, 5 * 19, 5 * 4 * 4]
    read.clear()
    letters = [[(shots + context + [300 + j], 1) for j in range(4)] for context in contexts]
    evaluation.score(model, letters)
    assert sum(read) == 100 + 5 * 20  # a single row for the four letters


def test_rolling_windows_score_each_token_once():
    class Numbers:
        eot_token, encode_ordinary = 0, staticmethod(lambda n: list(range(1, n + 1)))

    windows = lambda n: tasks.rolling_windows(Numbers, n, max_len=4)
    assert windows(10) == [([0, 1, 2, 3, 4], 4), ([4, 5, 6, 7, 8], 4), ([6, 7, 8, 9, 10], 2)]
    assert windows(2) == [([0, 1, 2], 2)] and windows(0) == []
    assert "a full window's first sees one token" in tasks.RULES["word_perplexity"]


def test_completions_are_the_slow_loops(model):
    """Prompts of different lengths in one batch, each ending at a different time."""
    prompts = [[5] * 3, [9, 8, 7, 6, 5], [1], [2] * 40, [17, 300]]
    finished = lambda new: sum(new) % 7 == 0 or len(new) == 20

    def alone(prompt):
        new = []
        while not new or not finished(new):
            new.append(model(torch.tensor([prompt + new]))[0, -1].argmax().item())
        return new

    expected = [alone(prompt) for prompt in prompts]
    assert len({len(new) for new in expected}) > 1
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2]):
        found = evaluation.complete(model, [prompts[i] for i in order], finished)
        assert found == [expected[i] for i in order]


def test_stops_are_found_across_tokens_and_in_broken_characters(monkeypatch):
    class Model:
        cfg = GPTConfig(n_layer=1, n_embd=8, n_head=1, seq_len=8, vocab_size=260)

    def write(script: bytes, *stops):
        def complete(model, prompts, finished):
            ends = (n for n in range(1, len(script)) if finished(list(script[:n])))
            return [list(script[: next(ends)])]

        monkeypatch.setattr(evaluation, "complete", complete)
        task = TASKS["gsm8k"]._replace(stops=stops, max_new_tokens=99)
        return evaluation.write(Model, data.load_tokenizer("bytes"), ["x"], task, 200)

    said = "a naïve b€ c Question: and more </s> text".encode()
    assert write(said, "Question:", "</s>") == ["a naïve b€ c "]
    assert write("x€".encode()[:2] + b"\xff and more", "never") == ["x\ufffd"]  # 255: end of text


LATEX = (
    "\\frac \\dfrac \\sqrt { } 1 2 x = / . 0.5 \\text{_cm} \\$ \\% ^\\circ \\left( \\right) $ \\! a _ \n"
).split(" ")
KNOWN = (
    "0.5 \\frac12 \\frac1{72} \\frac{1}{2} 1/2 x=1/2 .5 3/4 x/y \\sqrt3 5\\text{_m} 12\\% "
    "\\frac\\sqrt32 1/2/3 \\frac x="
).split(" ")


def test_math_answers_are_normalized_as_the_harness_does():
    utils = pytest.importorskip("lm_eval.tasks.hendrycks_math.utils", reason=needs_harness)
    rng = random.Random(0)
    texts = ["".join(rng.choices(LATEX, k=rng.randint(1, 7))) for _ in range(3000)]
    pairs = [*itertools.product(KNOWN, KNOWN), *zip(texts, texts), *zip(texts, texts[1:])]
    for text, gold in pairs:
        text, gold = text.replace("_", " "), gold.replace("_", " ")
        doc = {"solution": f"\\boxed{{{gold}}}"}
        if utils.last_boxed_only_string(doc["solution"]) != doc["solution"]:
            continue  # unbalanced braces
        try:
            expected = utils.process_results(doc, [text])["exact_match"]
        except (AssertionError, TypeError):
            continue
        assert tasks.grade_math(doc, text) == {"exact_match": bool(expected)}, (text, gold)
    for solution in ("\\boxed{\\frac{1}{\\sqrt{2}}}.", "\\boxed{1}, \\boxed{2}", "$\\boxed 7$ is"):
        last = utils.remove_boxed(utils.last_boxed_only_string(solution))
        assert tasks.boxed(solution) == last


def test_numbers_are_found_and_compared_as_the_harness_does():
    pytest.importorskip("lm_eval", reason=needs_harness)
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    config, rng, hits = harness.harness_task("gsm8k", harness.items()), random.Random(0), 0
    options = [dict(filters["filter"][0]) for filters in config["filter_list"]]
    regexes = [RegexFilter(**{k: v for k, v in o.items() if k != "function"}) for o in options]
    rules = dict(config["metric_list"][0])
    for key in ("metric", "aggregation", "higher_is_better"):
        del rules[key]
    parts = "####_ #### _ - 5 1,200 $ 7. . 12.50 \n words A , ####_3 -2".replace("_", " ")
    parts = [*parts.split(" "), " ", "#### "]
    for _ in range(2000):
        text = "".join(rng.choices(parts, k=rng.randint(0, 8)))
        answer = f"so {text[::2]} #### {rng.choice(['5', '1,200', '-2', '$7.', '12.50', '3'])}"
        ours = tasks.grade_gsm8k({"answer": answer}, text)
        for regex, metric in zip(regexes, ("exact_match", "exact_match_flexible"), strict=True):
            found = regex.apply([[text]], [{}])[0][0]
            same = exact_match_hf_evaluate([found], [answer], **rules)["exact_match"]
            assert ours[metric] == bool(same), (text, answer, metric)
        hits += sum(ours.values())
    assert hits > 100


def test_pages_are_detokenized_as_the_harness_does():
    module = "lm_eval.tasks.wikitext.preprocess_wikitext"
    utils, rng = pytest.importorskip(module, reason=needs_harness), random.Random(0)
    parts = " @-@ | @,@ | @.@ | : | . |! | ? |( | )|[| ] |\" |'| 's|s '|= =| = = = | ° |\n| N |word|7"
    parts = f"{parts}|/' 3/| {{ |}}| ".split("|")
    for _ in range(3000):
        page = "".join(rng.choices(parts, k=rng.randint(1, 25)))
        assert tasks.detokenize(page) == utils.wikitext_detokenizer({"page": page}), page


# Tables 5 and 6: arc, boolq, hellaswag, openbookqa, piqa, winogrande, average
PAPER_ROWS = """44.6 63.5 63.6 37.6 75.3 61.3 57.7 | 43.0 62.8 64.8 38.0 74.5 62.1 57.6
44.3 65.6 64.6 37.0 76.0 61.8 58.2 | 50.6 77.7 71.5 39.8 77.0 64.4 63.5
65.0 72.8 73.0 41.4 79.2 68.9 66.7 | 59.9 66.1 65.6 42.0 75.7 60.5 61.7"""


@pytest.mark.parametrize("row", re.split("[|\n]", PAPER_ROWS))
def test_averages_are_the_papers(row):
    arc, *columns, average = map(float, row.split())
    values = zip(tasks.AVERAGED, [arc + 7, arc - 7, *columns], strict=True)
    results = {name: {"acc": -1.0} | {TASKS[name].metric: value} for name, value in values}
    found = tasks.paper_average(results)["paper_average"]["average"]
    assert found == pytest.approx(average, abs=0.1)
    results.pop("piqa")
    assert tasks.paper_average(results) == {}


# -- the command line ----------------------------------------------------------------------------


def test_results_are_printed_and_saved(exported, folder, tmp_path, capsys):
    names = [*tasks.AVERAGED, "wikitext"]
    argv = ["--model", exported, "--tasks", ",".join(names), "--data", folder, "--device", "cpu"]
    assert evaluation.main([str(word) for word in [*argv, "--out", "scores.json"]]) == 0
    out, scores = capsys.readouterr().out, json.loads(Path("scores.json").read_text())
    assert list(scores) == [*names, "paper_average"]
    for name in names:
        metric, result = TASKS[name].metric, scores[name]
        n = 5 if name == "wikitext" else 12
        assert (result["n"], result["num_fewshot"], result["max_len"]) == (n, 0, MAX_LEN)
        assert math.isfinite(result[metric]) and result["rule"] == tasks.RULES[metric]
        assert (result[f"{metric}_stderr"] is None) == (name == "wikitext")
        row = rf"^{name} +\*{metric} +{result[metric]:.4f} .* n {n}, 0 shots, window {MAX_LEN};"
        assert re.search(row, out, re.MULTILINE), name
    assert f"{scores['paper_average']['average']:.4f}" in out
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


def test_flags_change_what_they_say(exported, folder, capsys):
    argv = ["--model", str(exported), "--device", "cpu"]
    flags = "--limit 3 --num_fewshot 2 --max_len 100 --dtype bfloat16 --batch_tokens 50".split()
    more = ["--tasks", "piqa", "--data", str(folder), "--out", "scores.json"]
    assert evaluation.main([*argv, *more, *flags]) == 0
    result = json.loads(Path("scores.json").read_text())["piqa"]
    assert (result["n"], result["num_fewshot"], result["max_len"]) == (3, 2, 100)
    assert result["dtype"] == "bfloat16"
    assert evaluation.main([*argv, "--prompt", "Question:", "--max_new_tokens", "5"]) == 0
    assert "Question:" in capsys.readouterr().out


def test_processes_share_the_items(exported, folder, tmp_path):
    argv = ["--tasks", "arc_easy,mmlu,wikitext", "--num_fewshot", "1", "--device", "cpu"]
    argv += ["--model", str(exported), "--data", str(folder), "--out"]
    assert evaluation.main([*argv, "one.json"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node", "2", str(ROOT / "eval.py"), *argv, str(tmp_path / "two.json")]
    done = subprocess.run(torchrun, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("arc_easy") == 2  # its two metrics, printed by one process
    one, two = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    numbers = lambda result: {k: v for k, v in result.items() if isinstance(v, float)}
    assert one.keys() == two.keys()
    for name in one:
        assert numbers(one[name]) and numbers(one[name]) == pytest.approx(numbers(two[name]))


def refusal(argv: list, capsys) -> str:
    """Run a command line that must be refused in one line; return the line."""
    try:
        status = evaluation.main([str(word) for word in argv])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and "Traceback" not in error, (argv, error)
    return error


PIQA = {"goal": "a", "sol1": "b", "sol2": "c", "label": 0}
WRONG = [  # file, its content, what the line names
    ("piqa", None, "piqa.jsonl: no such file"), ("piqa", "", "piqa.jsonl: is empty"),
    ("piqa", json.dumps(PIQA) + '\n{"goal": \n', "piqa.jsonl, line 2: not JSON"),
    ("piqa", "[1]", "line 1: not an item"), ("piqa", '{"goal": "a"}', "lacks 'sol1'"),
    ("piqa", json.dumps(PIQA | {"sol2": 3}), "should be text"),
    ("piqa", json.dumps(PIQA | {"label": 2}), "no answer number 2"),
    ("winogrande", '{"sentence": "no gap", "answer": "1"}', "line 1: not an item"),
    ("humaneval", '{"prompt": "a", "test": "b", "entry_point": "c"}', "lacks 'task_id'"),
    ("math", '{"problem": "a", "solution": "none", "type": "Algebra"}', "boxed"),
]  # fmt: skip


@pytest.mark.parametrize("task, content, says", WRONG)
def test_wrong_items_are_named_in_one_line(task, content, says, exported, tmp_path, capsys):
    if content is not None:
        Path(f"{task}.jsonl").write_text(content)
    before = sorted(tmp_path.iterdir())
    argv = ["--model", exported, "--tasks", task, "--data", ".", "--out", "x.json"]
    assert says in refusal([*argv, "--device", "cpu"], capsys)
    assert sorted(tmp_path.iterdir()) == before


WRONG_FLAGS = [
    ("--tasks piqa,nonsense", "nonsense"), ("--max_len 9999", "--max_len 9999"),
    ("--limit 0", "--limit 0"), ("--num_fewshot 18", "needs 19 examples"),
    ("--out no/such/folder.json", "--out"), ("--max_len 24 --tasks gsm8k", "leaves no room"),
    ("--data nowhere", "nowhere"), ("--model nowhere", "nowhere"), ("--temperature nan", "nan"),
]  # fmt: skip


@pytest.mark.parametrize("flags, says", WRONG_FLAGS)
def test_wrong_flags_are_refused(flags, says, exported, folder, tmp_path, capsys):
    argv = ["--model", exported, "--tasks", "piqa", "--data", folder, "--device", "cpu"]
    assert says in refusal([*argv, *flags.split()], capsys)
    assert not list(tmp_path.iterdir())


def test_without_a_network_the_folder_has_to_be_named(exported, capsys):
    error = refusal(["--model", exported, "--tasks", "piqa", "--device", "cpu"], capsys)
    assert "--data" in error and "piqa.jsonl" in error


@pytest.mark.parametrize("name", TASKS)
def test_downloads_are_the_harness_data_sets(name, monkeypatch):
    """Repositories, configurations and splits by the harness's definitions."""
    loader = pytest.importorskip("lm_eval.tasks._yaml_loader", reason=needs_harness)
    file = harness.TASK_FILES[name].split()[0]
    file = file.format({"mmlu": "anatomy", "math": "algebra"}.get(name, ""))
    yaml, asked = Path(loader.__file__).parent / f"{file}.yaml", []
    theirs = loader.load_yaml(yaml, resolve_func=False)

    class Hub:
        get_dataset_config_names = staticmethod(lambda repo: ["algebra"])
        load_dataset = lambda *args, split: asked.append((*args, split)) or [{"task_id": 1}]

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    configs = (theirs.get("dataset_name"), "default", "openai_humaneval", "all")
    splits = [theirs.get("test_split") or theirs["validation_split"]]
    if name == "mbpp":
        splits.append("prompt[1:]")  # task_id 2 to 4, which are in the harness's code
    elif name not in ("wikitext", "humaneval"):
        splits.append(theirs.get("fewshot_split") or theirs.get("training_split"))
    for examples, split in enumerate(splits):
        [(where, doc)] = tasks.read_items(name, None, bool(examples))
        assert where.endswith(".jsonl, item 1") and doc == {"task_id": 1}
        repo, config, ours = asked.pop()
        assert (repo, ours) == (theirs["dataset_path"], split) and config in configs
