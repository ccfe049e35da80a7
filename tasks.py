"""Turn benchmark items into questions, and likelihoods into scores, as
lm-evaluation-harness does.

The paper used that program, and we follow its rules, oddities included. This file
contains no model: `questions_of` turns items (JSON objects with the fields of the public
dataset) into texts, and `measure` turns the log-likelihoods of these texts into metrics.

    python tasks.py piqa --data FOLDER    show the first question of FOLDER/piqa.jsonl
"""

import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools import flags
from tools.flags import UserError

# -- Items to questions ------------------------------------------------------------------


class Question(NamedTuple):
    contexts: list[str]  # the texts before the choices
    choices: list[str]  # the texts to compare
    gold: int = 0  # number of the right choice
    doc: dict = {}  # the item behind this question
    group: str = ""  # the subject in mmlu; every subject has separate examples


class Task(NamedTuple):
    metric: str  # the metric in the tables of the paper
    ask: Callable[[dict], Question]
    draw: str = "any"  # examples: "first", "any", or "others" (any but the item itself)


def choose(context: str, choices: list[str], gold: int = 0) -> Question:
    """A question with the same context before all choices."""
    return Question([context] * len(choices), choices, int(gold))


def labelled(context: str, doc: dict) -> Question:
    """A question whose choices have labels, such as A to D."""
    texts = doc["choices"]["text"]
    labels = doc["choices"]["label"]
    return choose(context, texts, labels.index(doc["answerKey"].lstrip()))


def wikitext(doc: dict) -> Question:
    return choose("", [detokenize(doc["page"])])


def arc(doc: dict) -> Question:
    return labelled(f"Question: {doc['question']}\nAnswer:", doc)


def boolq(doc: dict) -> Question:
    context = f"{doc['passage']}\nQuestion: {doc['question']}?\nAnswer:"
    return choose(context, ["no", "yes"], doc["label"])


def openbookqa(doc: dict) -> Question:
    return labelled(doc["question_stem"], doc)


def piqa(doc: dict) -> Question:
    context = f"Question: {doc['goal']}\nAnswer:"
    return choose(context, [doc["sol1"], doc["sol2"]], doc["label"])


def hellaswag(doc: dict) -> Question:
    def clean(text: str) -> str:
        text = text.strip()
        text = text.replace(" [title]", ". ")
        text = re.sub(r"\[.*?\]", "", text)  # brackets left over from WikiHow headings
        return text.replace("  ", " ")

    context = f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"
    endings = [clean(ending) for ending in doc["endings"]]
    return choose(clean(context), endings, doc["label"])


def winogrande(doc: dict) -> Question:
    """The reverse of the other tasks, with two contexts and one text to follow both."""
    before, after = doc["sentence"].split("_", 1)
    after = after.strip()
    contexts = [before + doc["option1"], before + doc["option2"]]
    return Question(contexts, [after, after], ["1", "2"].index(doc["answer"]))


def mmlu(doc: dict) -> Question:
    a, b, c, d = doc["choices"]
    context = f"{doc['question'].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
    question = choose(context, ["A", "B", "C", "D"], doc["answer"])
    return question._replace(group=doc["subject"])


def detokenize(page: str) -> str:
    """Undo Wikitext's spaces around punctuation. The order of the steps matters."""
    page = page.replace("s '", "s'")
    page = re.sub(r"/' [0-9]/", "/'[0-9]/", page)
    for mark in "-,.":
        page = page.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        page = page.replace(f" {mark} ", f"{mark} ")
    for opens, closes in ("()", "[]", "{}", '""', "''"):
        with_spaces = rf"\{opens}\s*([^\{closes}]*?)\s*\{closes}"
        page = re.sub(with_spaces, rf"{opens}\1{closes}", page)
    page = page.replace("= = = =", "====")
    page = page.replace("= = =", "===")
    page = page.replace("= =", "==")
    page = page.replace(" ° ", "°")
    page = page.replace(" \n", "\n")
    page = page.replace("\n ", "\n")
    page = page.replace(" N ", " 1 ")
    page = page.replace(" 's", "'s")
    return page


TASKS = {
    "wikitext": Task("word_perplexity", wikitext),
    "arc_easy": Task("acc_norm", arc),
    "arc_challenge": Task("acc_norm", arc),
    "boolq": Task("acc", boolq, "others"),
    "hellaswag": Task("acc_norm", hellaswag, "others"),
    "openbookqa": Task("acc_norm", openbookqa),
    "piqa": Task("acc_norm", piqa, "others"),
    "winogrande": Task("acc", winogrande, "others"),
    "mmlu": Task("acc", mmlu, "first"),
}


def read_questions(name: str, path: Path, limit: int | None = None) -> list[Question]:
    """Read items of a task, one per line. Raises UserError, naming the line, for anything else."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; put items of {name} there, one per line")
    lines = path.read_bytes().splitlines()[:limit]
    questions = []
    for number, item in enumerate(lines, start=1):
        try:
            doc = json.loads(item)
            question = TASKS[name].ask(doc)._replace(doc=doc)
            if not 0 <= question.gold < len(question.choices):
                raise UserError(f"no choice number {question.gold}")
            for text in (*question.contexts, *question.choices, question.group):
                if not isinstance(text, str):
                    raise UserError(f"{text!r} is not a text")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}, line {number}: not an item of {name} ({error!r})"
            ) from None
        questions.append(question)
    if not any(any(question.choices) for question in questions):
        raise UserError(f"{path}: is empty")
    return questions


def draw_examples(
    draw: str, question: Question, pool: list, n: int, generator
) -> list[Question]:
    """Draw n examples from the pool as the harness does, with the same random numbers."""
    if draw == "first" or n == 0:
        return pool[:n]
    if draw == "any":
        return generator.sample(pool, n)
    # one more than we need, because the item itself may be among them
    drawn = generator.sample(pool, n + 1)
    drawn = [example for example in drawn if example.doc != question.doc]
    if len(drawn) >= n:
        return drawn[:n]
    others = [example for example in pool if example.doc != question.doc]
    return generator.sample(others, n)  # the item was drawn twice


def questions_of(name: str, folder: str, shots: int, limit=None) -> list[Question]:
    """Read the questions of a task, and put `shots` examples before every question."""
    task = TASKS[name]

    # 1. Read the questions and the pool of examples for each group of questions
    questions = read_questions(name, Path(folder, f"{name}.jsonl"), limit)
    pools = {question.group: [] for question in questions}
    if shots:
        split = "dev" if name == "mmlu" else "train"
        for example in read_questions(name, Path(folder, f"{name}.{split}.jsonl")):
            pools.setdefault(example.group, []).append(example)
    generators = {group: random.Random(1234) for group in pools}

    # 2. Put examples before the questions
    intro = "The following are multiple choice questions (with answers) about {}.\n\n"
    needed = 0
    if shots:
        needed = shots + 1 if task.draw == "others" else shots
    for i, question in enumerate(questions):
        group = question.group
        pool = pools[group]
        if len(pool) < needed:
            raise UserError(
                f"--num_fewshot {shots}: {name} {group} needs {needed} examples, "
                f"but has {len(pool)}"
            )
        before = intro.format(group.replace("_", " ")) if name == "mmlu" else ""
        for shot in draw_examples(task.draw, question, pool, shots, generators[group]):
            before += f"{shot.contexts[shot.gold]} {shot.choices[shot.gold]}\n\n"
        contexts = [before + text for text in question.contexts]
        questions[i] = question._replace(contexts=contexts)
    return questions


def prepare(args, seq_len: int) -> dict[str, tuple[list[Question], int]]:
    """Read the items of all --tasks -> {task: (its questions, number of examples)}."""
    if not args.data:
        raise UserError(
            "--tasks: needs --data, the folder of their items (docs/evaluate.md)"
        )
    if args.max_len > seq_len:
        raise UserError(
            f"--max_len {args.max_len}: the seq_len of the model is {seq_len}"
        )
    work = {}
    for name in args.tasks.split(","):
        if name not in TASKS:
            raise UserError(
                f"--tasks {name}: must be one of {', '.join(TASKS)}; for others, "
                "export the model and run lm_eval (docs/evaluate.md)"
            )
        if name == "wikitext":
            shots = 0  # its pages need no examples
        elif args.num_fewshot is not None:
            shots = args.num_fewshot
        else:
            shots = 5 if name == "mmlu" else 0  # as in the paper
        questions = questions_of(name, args.data, shots, args.limit)
        work[name] = (questions, shots)
    return work


# -- Questions to tokens -----------------------------------------------------------------


class Request(NamedTuple):
    ids: list[int]  # token ids, of which the model reads all but the last
    n: int  # how many of them, at the end, to score
    is_cut: bool = False  # the window is too short for the context
    choice_is_cut: bool = False  # and even for the choice


def requests(tokenizer, question: Question, max_len: int) -> Iterator[Request]:
    """Encode the choices after their contexts, keeping the last max_len + 1 tokens.

    The model reads all tokens but the last, so these fill a window of max_len. A space
    belongs to the word after it, so we score whitespace at the end of the context with
    the choice. A token that spans both belongs to the choice, if it has no other.
    """
    for context, choice in zip(question.contexts, question.choices):
        before = tokenizer.encode_ordinary(context.rstrip())
        whole = tokenizer.encode_ordinary(f"{context} {choice}")
        after = whole[len(before) :]
        if not after:
            before = whole[:-1]
            after = whole[-1:] or [tokenizer.eot_token]
        if not before:  # the model needs a token to predict the first one from
            before = [tokenizer.eot_token]
        ids = (before + after)[-(max_len + 1) :]
        n = min(len(after), len(ids) - 1)
        cut = len(before) + len(after) - len(ids)
        yield Request(ids, n, is_cut=cut > 0, choice_is_cut=n < len(after))


def rolling_windows(tokenizer, text: str, max_len: int) -> Iterator[Request]:
    """Cut a long text into windows that score every token once.

    The first token of a full window has only one token of context. We fill up the last
    window, if it is shorter, with earlier tokens.
    """
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(text)]
    for start in range(1, len(ids), max_len):
        end = min(start + max_len, len(ids))
        yield Request(ids[max(0, end - max_len - 1) : end], end - start)


# -- Likelihoods to scores ---------------------------------------------------------------

RULES = {
    "acc": "most likely choice",
    "acc_norm": "most likely choice, in acc_norm by log-likelihood per character",
    "word_perplexity": "windows, every token once; a full window's first sees one token before it",
}


def measure(name: str, questions: list[Question], answers: list) -> dict:
    """Compute the metrics of a task with their standard errors, and name the rule behind them.

    An answer is the log-likelihoods (in nats) of the choices of a question, or that of
    its page.
    """
    metric = TASKS[name].metric
    result = {"rule": RULES[metric], "paper_metric": metric}
    if name == "wikitext":
        return result | perplexities([q.doc["page"] for q in questions], answers)
    groups = [question.group for question in questions]
    kinds = ["acc", "acc_norm"] if metric == "acc_norm" else ["acc"]
    for kind in kinds:
        right = [is_right(q, sums, kind) for q, sums in zip(questions, answers)]
        mean, stderr = mean_and_stderr(right, groups)
        result[kind] = mean
        result[f"{kind}_stderr"] = stderr
    return result


def is_right(question: Question, sums: list[float], kind: str) -> bool:
    """Is the most likely choice right? acc_norm divides by the number of characters."""
    scores = np.array(sums)
    if kind == "acc_norm":
        scores = scores / [max(1, len(text)) for text in question.choices]
    return int(np.argmax(scores)) == question.gold  # the first of equal choices


def perplexities(pages: list[str], answers: list[float]) -> dict:
    """Per word and byte of the pages as they were before detokenization."""
    nats = -math.fsum(answers)
    n_words = sum(len(re.split(r"\s+", page)) for page in pages)
    n_bytes = sum(len(page.encode()) for page in pages)
    return {
        "word_perplexity": exp(nats / n_words),
        "byte_perplexity": exp(nats / n_bytes),
        "bits_per_byte": nats / n_bytes / math.log(2),
        "word_perplexity_stderr": None,
        "byte_perplexity_stderr": None,
        "bits_per_byte_stderr": None,
    }


def exp(x: float) -> float:
    """math.exp, but infinity beyond the largest float, which a page of one long word reaches."""
    return math.exp(x) if x < 709 else math.inf


def mean_and_stderr(values: list, groups: list[str]) -> tuple[float, float | None]:
    """The mean, and its standard error from the spread of the values around their group's mean."""
    values = np.array(values, dtype=float)
    groups = np.array(groups)
    names = dict.fromkeys(groups.tolist())  # each group once
    squares = 0.0
    for name in names:
        part = values[groups == name]
        squares += len(part) * part.var()
    mean = values.mean().item()
    freedom = len(values) - len(names)
    if not freedom:
        return mean, None
    return mean, math.sqrt(squares / freedom / len(values))


def report(name: str, result: dict) -> None:
    """Print one line per metric of a task."""
    facts = "n {n}, {num_fewshot} shots, window {max_len}; {rule}".format(**result)
    for metric in result:
        if f"{metric}_stderr" not in result:
            continue
        stderr = result[f"{metric}_stderr"]
        spread = "" if stderr is None else f"+-{stderr:.4f}"
        print(f"{name:<14}{metric:<21}{result[metric]:>9.4f} {spread:<9} {facts}")
    for what, text in NOTES.items():
        if result[what]:
            print(f"{name:<14}{result[what]:,} of {result['n']:,} items {text}")


NOTES = {
    "n_cut": "are longer than the window, and lose the start of their context",
    "n_choices_cut": "have a choice that is longer than the window, so its score is wrong",
    "n_empty": "have an empty choice, which is scored as a space",
}


def count_notes(questions: list[Question], items: list[list[Request]]) -> dict[str, int]:
    """How many items have something that a reader of the scores should know."""
    return {
        "n_cut": sum(any(request.is_cut for request in item) for item in items),
        "n_choices_cut": sum(
            any(request.choice_is_cut for request in item) for item in items
        ),
        "n_empty": sum("" in question.choices for question in questions),
    }


def main(argv: list[str] | None = None) -> int:
    parser = flags.program_parser("tasks.py", __doc__)
    add = parser.add_argument
    add("task", choices=TASKS)
    add("--data", required=True, help="folder of TASK.jsonl")
    add("--num_fewshot", type=flags.at_least(0), default=0, help="examples before it")
    args = parser.parse_args(argv)
    try:
        questions = questions_of(args.task, args.data, args.num_fewshot, limit=1)
    except (UserError, OSError) as error:
        return flags.fail("tasks.py", error)
    for context, choice in zip(questions[0].contexts, questions[0].choices):
        print(f"{context} [{choice}]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
