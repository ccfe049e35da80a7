"""Turn benchmark items into questions, and likelihoods into scores, as
lm-evaluation-harness does.

The paper used that program, and we follow its rules, oddities included. This file
contains no model: `questions_of` turns items (JSON objects with the fields of the public
dataset) into texts, and `measure` turns the log-likelihoods of these texts into metrics.
"""

import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.flags import UserError


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
    return Question([context] * len(choices), choices, int(gold))


def labelled(context: str, doc: dict) -> Question:
    choices = doc["choices"]
    return choose(
        context, choices["text"], choices["label"].index(doc["answerKey"].lstrip())
    )


def hellaswag(doc: dict) -> Question:
    def clean(text: str) -> str:  # the brackets are left over from WikiHow headings
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace(
            "  ", " "
        )

    context = f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"
    return choose(
        clean(context), [clean(ending) for ending in doc["endings"]], doc["label"]
    )


def winogrande(doc: dict) -> Question:
    """The reverse of the other tasks, with two contexts and one text to follow both."""
    before, after = doc["sentence"].split("_", 1)
    contexts = [before + doc["option1"], before + doc["option2"]]
    return Question(contexts, [after.strip()] * 2, ["1", "2"].index(doc["answer"]))


def mmlu(doc: dict) -> Question:
    a, b, c, d = doc["choices"]
    context = f"{doc['question'].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
    return choose(context, list("ABCD"), doc["answer"])._replace(group=doc["subject"])


def detokenize(page: str) -> str:
    """Undo Wikitext's spaces around punctuation. The order of the steps matters."""
    page = page.replace("s '", "s'")
    page = re.sub(r"/' [0-9]/", "/'[0-9]/", page)
    for mark in "-,.":
        page = page.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        page = page.replace(f" {mark} ", f"{mark} ")
    for opens, closes in ("()", "[]", "{}", '""', "''"):
        page = re.sub(
            rf"\{opens}\s*([^\{closes}]*?)\s*\{closes}", rf"{opens}\1{closes}", page
        )
    for n in (4, 3, 2):
        page = page.replace(" ".join("=" * n), "=" * n)
    for old, new in (
        (" ° ", "°"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ):
        page = page.replace(old, new)
    return page


ARC = lambda d: labelled(f"Question: {d['question']}\nAnswer:", d)
TASKS = {
    "wikitext": Task("word_perplexity", lambda d: choose("", [detokenize(d["page"])])),
    "arc_easy": Task("acc_norm", ARC),
    "arc_challenge": Task("acc_norm", ARC),
    "boolq": Task(
        "acc",
        lambda d: choose(
            f"{d['passage']}\nQuestion: {d['question']}?\nAnswer:",
            ["no", "yes"],
            d["label"],
        ),
        "others",
    ),
    "hellaswag": Task("acc_norm", hellaswag, "others"),
    "openbookqa": Task("acc_norm", lambda d: labelled(d["question_stem"], d)),
    "piqa": Task(
        "acc_norm",
        lambda d: choose(
            f"Question: {d['goal']}\nAnswer:", [d["sol1"], d["sol2"]], d["label"]
        ),
        "others",
    ),
    "winogrande": Task("acc", winogrande, "others"),
    "mmlu": Task("acc", mmlu, "first"),
}


def read_questions(name: str, path: Path, limit: int | None = None) -> list[Question]:
    """Read items of a task, one per line. Raises UserError, naming the line, for anything
    else."""
    questions = []
    if not path.is_file():
        raise UserError(f"{path}: no such file; put items of {name} there, one per line")
    for number, item in enumerate(path.read_bytes().splitlines()[:limit], 1):
        try:
            doc = json.loads(item)
            question = TASKS[name].ask(doc)._replace(doc=doc)
            if not 0 <= question.gold < len(question.choices):
                raise UserError(f"no choice number {question.gold}")
            for text in (*question.contexts, *question.choices, question.group):
                if not isinstance(text, str):
                    raise UserError(f"{text!r} is not a text")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: not an item of {name} ({error!r})"
            ) from None
        questions.append(question)
    if not any(text for question in questions for text in question.choices):
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
    drawn = [
        example
        for example in generator.sample(pool, n + 1)
        if example.doc != question.doc
    ]
    others = [example for example in pool if example.doc != question.doc]
    return (
        drawn[:n] if len(drawn) >= n else generator.sample(others, n)
    )  # the item came twice


def questions_of(name: str, folder: str, shots: int, limit=None) -> list[Question]:
    """Read the questions of a task, and put `shots` examples before every question."""
    task, questions = (
        TASKS[name],
        read_questions(name, Path(folder, f"{name}.jsonl"), limit),
    )
    path = Path(folder, f"{name}.dev.jsonl" if name == "mmlu" else f"{name}.train.jsonl")
    pools, generators = defaultdict(list), defaultdict(lambda: random.Random(1234))
    for example in read_questions(name, path) if shots else ():
        pools[example.group].append(example)
    intro = "The following are multiple choice questions (with answers) about {}.\n\n"
    for i, question in enumerate(questions):
        group, pool = question.group, pools[question.group]
        needed = shots + (task.draw == "others") if shots else 0
        if len(pool) < needed:
            raise UserError(
                f"--num_fewshot {shots}: {name} {group} needs {needed} examples, "
                f"but has {len(pool)}"
            )
        before = intro.format(group.replace("_", " ")) if name == "mmlu" else ""
        for shot in draw_examples(task.draw, question, pool, shots, generators[group]):
            before += f"{shot.contexts[shot.gold]} {shot.choices[shot.gold]}\n\n"
        questions[i] = question._replace(
            contexts=[before + text for text in question.contexts]
        )
    return questions


def prepare(args, seq_len: int) -> dict[str, tuple[list[Question], int]]:
    """Read the items of all --tasks -> {task: (its questions, number of examples)}."""
    work = {}
    if not args.data:
        raise UserError(
            "--tasks: needs --data, the folder of their items (docs/evaluate.md)"
        )
    if args.max_len > seq_len:
        raise UserError(
            f"--max_len {args.max_len}: the seq_len of the model is {seq_len}"
        )
    for name in args.tasks.split(","):
        if name not in TASKS:
            raise UserError(
                f"--tasks {name}: must be one of {', '.join(TASKS)}; for others, "
                "export the model and run lm_eval (docs/evaluate.md)"
            )
        fixed = args.num_fewshot is None or name == "wikitext"  # it has no examples
        shots = 5 * (name == "mmlu") if fixed else args.num_fewshot  # as in the paper
        work[name] = questions_of(name, args.data, shots, args.limit), shots
    return work


# -- Questions to tokens -----------------------------------------------------------------

Request = tuple[list[int], int]  # token ids, and how many at the end to score


def requests(tokenizer, question: Question, max_len: int) -> Iterator[Request]:
    """Encode the choices after their contexts, keeping the last max_len + 1 tokens.

    The model reads all tokens but the last, so these fill a window of max_len. A space
    belongs to the word after it, so we score whitespace at the end of the context with
    the choice.
    """
    for context, choice in zip(question.contexts, question.choices):
        before = tokenizer.encode_ordinary(context.rstrip())
        after = tokenizer.encode_ordinary(f"{context} {choice}")[len(before) :]
        ids = [*(before or [tokenizer.eot_token]), *after][-(max_len + 1) :]
        yield ids, min(len(after), len(ids) - 1)


def rolling_windows(tokenizer, text: str, max_len: int) -> Iterator[Request]:
    """Cut a long text into windows that score every token once.

    The first token of a full window has only one token of context. We fill up the last
    window, if it is shorter, with earlier tokens.
    """
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(text)]
    for start in range(1, len(ids), max_len):
        end = min(start + max_len, len(ids))
        yield ids[max(0, end - max_len - 1) : end], end - start


# -- Likelihoods to scores ---------------------------------------------------------------

RULES = {
    "acc": "most likely choice",
    "acc_norm": "most likely choice, in acc_norm by log-likelihood per character",
    "word_perplexity": "windows, every token once; a full window's first sees one token before it",
}


def measure(name: str, questions: list[Question], answers: list) -> dict:
    """Compute the metrics of a task with their standard errors, and name the rule behind
    them.

    An answer is the log-likelihoods (in nats) of the choices of a question, or that of
    its page.
    """
    metric = TASKS[name].metric
    result = {"rule": RULES[metric], "paper_metric": metric}
    if name == "wikitext":
        return result | perplexities([q.doc["page"] for q in questions], answers)
    for kind in dict.fromkeys(("acc", metric)):
        right = [is_right(q, sums, kind) for q, sums in zip(questions, answers)]
        mean, stderr = mean_and_stderr(right, [q.group for q in questions])
        result |= {kind: mean, f"{kind}_stderr": stderr}
    return result


def is_right(question: Question, sums: list[float], kind: str) -> bool:
    """Is the most likely choice right? acc_norm divides by the number of characters."""
    lengths = [max(1, len(text)) for text in question.choices]
    scores = np.divide(sums, lengths) if kind == "acc_norm" else sums
    return int(np.argmax(scores)) == question.gold  # the first of equal ones


def perplexities(pages: list[str], answers: list[float]) -> dict:
    """Per word and byte of the pages as they were before detokenization."""
    nats = -math.fsum(answers)
    per_word = nats / sum(len(re.split(r"\s+", page)) for page in pages)
    per_byte = nats / sum(len(page.encode()) for page in pages)
    result = {"word_perplexity": exp(per_word), "byte_perplexity": exp(per_byte)}
    result["bits_per_byte"] = per_byte / math.log(2)
    return result | {f"{metric}_stderr": None for metric in result}


def exp(x: float) -> float:
    """math.exp, but infinity beyond the largest float, which a page of one long word
    reaches."""
    return math.exp(x) if x < 709 else math.inf


def mean_and_stderr(values: list, groups: list[str]) -> tuple[float, float | None]:
    """The mean, and its standard error from the spread of the values around their group's
    mean."""
    values, groups = np.array(values, dtype=float), np.array(groups)
    parts = [values[groups == group] for group in dict.fromkeys(groups)]
    squares = sum(len(part) * part.var() for part in parts)
    freedom = len(values) - len(parts)
    return values.mean().item(), math.sqrt(
        squares / freedom / len(values)
    ) if freedom else None


def report(name: str, result: dict) -> None:
    """Print one line per metric of a task."""
    facts = "n {n}, {num_fewshot} shots, window {max_len}; {rule}".format(**result)
    for metric in (key for key in result if f"{key}_stderr" in result):
        stderr = result[f"{metric}_stderr"]
        spread = "" if stderr is None else f"+-{stderr:.4f}"
        print(f"{name:<14}{metric:<21}{result[metric]:>9.4f} {spread:<9} {facts}")
