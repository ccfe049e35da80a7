"""Nine benchmarks: from an item of a public dataset to the texts that eval.py scores.

An item is a JSON object with the fields of the dataset. Every benchmark has a function
that turns an item into a question, with the words of lm-evaluation-harness, oddities
included. The function of wikitext returns a page.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from tools.flags import UserError


class Question(NamedTuple):
    contexts: list[str]  # the text before every choice
    choices: list[str]  # the texts to compare
    gold: int  # number of the right choice
    subject: str = ""  # in mmlu


def same_context(context: str, choices: list[str], gold: int) -> Question:
    """A question with the same context before all choices."""
    if gold not in range(len(choices)):  # -1 in test splits, which keep it secret
        raise ValueError(f"no choice has number {gold}")
    return Question([context] * len(choices), choices, gold)


def labelled(context: str, item: dict) -> Question:
    """A question whose choices have labels, such as A to D."""
    gold = item["choices"]["label"].index(item["answerKey"])
    return same_context(context, item["choices"]["text"], gold)


def arc(item: dict) -> Question:
    return labelled(f"Question: {item['question']}\nAnswer:", item)


def openbookqa(item: dict) -> Question:
    return labelled(item["question_stem"], item)


def boolq(item: dict) -> Question:
    context = f"{item['passage']}\nQuestion: {item['question']}?\nAnswer:"
    return same_context(context, ["no", "yes"], item["label"])


def piqa(item: dict) -> Question:
    context = f"Question: {item['goal']}\nAnswer:"
    return same_context(context, [item["sol1"], item["sol2"]], item["label"])


def hellaswag(item: dict) -> Question:
    def clean(text: str) -> str:
        text = text.strip()
        text = text.replace(" [title]", ". ")
        text = re.sub(r"\[.*?\]", "", text)  # brackets left over from WikiHow headings
        return text.replace("  ", " ")

    context = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
    endings = [clean(ending) for ending in item["endings"]]
    return same_context(clean(context), endings, int(item["label"]))


def winogrande(item: dict) -> Question:
    """Two contexts before the same text. In the other tasks, the texts differ."""
    before, after = item["sentence"].split("_", 1)
    after = after.strip()
    contexts = [before + item["option1"], before + item["option2"]]
    return Question(contexts, [after, after], ["1", "2"].index(item["answer"]))


def mmlu(item: dict) -> Question:
    a, b, c, d = item["choices"]
    context = f"{item['question'].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
    question = same_context(context, ["A", "B", "C", "D"], item["answer"])
    return question._replace(subject=item["subject"])


def with_examples(question: Question, examples: list[Question]) -> Question:
    """A question of mmlu after five examples of its subject, as in the paper.

    Raises UserError if they are fewer.
    """
    shots = [shot for shot in examples if shot.subject == question.subject][:5]
    if len(shots) < 5:
        rule = f"has {len(shots)} examples of {question.subject}, and needs 5"
        raise UserError(f"mmlu.dev.jsonl: {rule}")
    before = "The following are multiple choice questions (with answers) about "
    before += f"{question.subject.replace('_', ' ')}.\n\n"
    for shot in shots:
        before += f"{shot.contexts[shot.gold]} {shot.choices[shot.gold]}\n\n"
    return question._replace(contexts=[before + text for text in question.contexts])


def wikitext(item: dict) -> str:
    return item["page"]


def detokenize(page: str) -> str:
    """Undo Wikitext's spaces around punctuation, as the harness does, step by step."""
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
    return page.replace(" 's", "'s")


def read_items(file: Path) -> list[dict]:
    # not splitlines of a text, which would also split at some characters in JSON
    return [json.loads(line) for line in file.read_bytes().splitlines()]


TASKS = {  # name -> function that reads an item, and metrics (the paper uses the last)
    "wikitext": (wikitext, ["word_perplexity"]),
    "arc_easy": (arc, ["acc", "acc_norm"]),
    "arc_challenge": (arc, ["acc", "acc_norm"]),
    "boolq": (boolq, ["acc"]),
    "hellaswag": (hellaswag, ["acc", "acc_norm"]),
    "openbookqa": (openbookqa, ["acc", "acc_norm"]),
    "piqa": (piqa, ["acc", "acc_norm"]),
    "winogrande": (winogrande, ["acc"]),
    "mmlu": (mmlu, ["acc"]),
}


def read_task(name: str, folder: Path) -> list:
    """The questions of a task, or the pages of wikitext, from a file with an item a line.

    Raises UserError or OSError, and the errors of a file that has other items.
    """
    if name not in TASKS:
        raise UserError(f"--tasks {name}: must be one of {', '.join(TASKS)}")
    read, _ = TASKS[name]
    items = [read(item) for item in read_items(folder / f"{name}.jsonl")]
    if name == "mmlu":
        examples = [mmlu(item) for item in read_items(folder / "mmlu.dev.jsonl")]
        items = [with_examples(question, examples) for question in items]
    return items
