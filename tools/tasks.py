"""Turn benchmark items into questions, and answers into scores, as lm-evaluation-harness does.

The paper used that program for Tables 5 to 7, and we follow its rules, oddities included. This
file contains no model: `questions_of` turns items (JSON objects with the fields of the public
dataset) into texts, and `measure` turns the answers of a model into metrics.
"""

import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Question(NamedTuple):
    contexts: list[str]  # the texts before the choices
    choices: list[str]  # texts to compare, or if the model writes, the right answer
    gold: int = 0  # number of the right choice
    doc: dict = {}  # the item behind this question
    group: str = ""  # its subject, in tasks that have several


class Task(NamedTuple):
    source: str  # public dataset, configuration, split to evaluate, split of the examples
    metric: str  # of Tables 5 to 7 of the paper
    ask: Callable[[dict], Question]
    draw: str = "any"  # examples: "none", "first", "any", "others" (any but the item itself)
    shots: int = 0  # examples before a question, in the paper
    group: str = ""  # field that divides the items; every group has separate examples
    stops: tuple[str, ...] = ()  # texts that end an answer, if the model writes it
    max_new_tokens: int = 256
    grade: Callable[[dict, str], bool] | None = None  # of (item, answer)
    program: Callable[[dict, str], str] | None = None  # (item, answer) -> program with its tests


# -- Items to questions ------------------------------------------------------------------------


def choose(context: str, choices: list[str], gold: int = 0) -> Question:
    return Question([context] * len(choices), choices, int(gold))


def labelled(context: str, doc: dict) -> Question:
    choices = doc["choices"]
    return choose(context, choices["text"], choices["label"].index(doc["answerKey"].lstrip()))


def boolq(doc: dict) -> Question:
    context = f"{doc['passage']}\nQuestion: {doc['question']}?\nAnswer:"
    return choose(context, ["no", "yes"], doc["label"])


def hellaswag(doc: dict) -> Question:
    def clean(text: str) -> str:  # the brackets are left over from WikiHow headings
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"
    return choose(clean(context), [clean(ending) for ending in doc["endings"]], doc["label"])


def winogrande(doc: dict) -> Question:
    """The reverse of the other tasks, with two contexts and one text to follow both."""
    before, after = doc["sentence"].split("_", 1)
    contexts = [before + doc["option1"], before + doc["option2"]]
    return Question(contexts, [after.strip()] * 2, ["1", "2"].index(doc["answer"]))


def mmlu(doc: dict) -> Question:
    a, b, c, d = doc["choices"]
    context = f"{doc['question'].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
    return choose(context, list("ABCD"), doc["answer"])


def mbpp(doc: dict) -> Question:
    one, two, three = doc["test_list"][:3]
    context = f"You are an expert Python programmer, and here is your task: {doc['text']} " \
              f"Your code should pass these tests:\n\n{one}\n{two}\n{three}\n[BEGIN]\n"  # fmt: skip
    return choose(context, [f"{doc['code']}\n[DONE]"])


def detokenize(page: str) -> str:
    """Undo Wikitext's spaces around punctuation. The order of the steps matters."""
    page = page.replace("s '", "s'")
    page = re.sub(r"/' [0-9]/", "/'[0-9]/", page)
    for mark in "-,.":
        page = page.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        page = page.replace(f" {mark} ", f"{mark} ")
    for opens, closes in ("()", "[]", "{}", '""', "''"):
        page = re.sub(rf"\{opens}\s*([^\{closes}]*?)\s*\{closes}", rf"{opens}\1{closes}", page)
    for n in (4, 3, 2):
        page = page.replace(" ".join("=" * n), "=" * n)
    for old, new in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        page = page.replace(old, new)
    return page


# -- Grading -----------------------------------------------------------------------------------


def grade_gsm8k(doc: dict, output: str) -> bool:
    """Compare the first number after #### (the "strict-match" of the harness)."""

    def bare(text: str) -> str:
        for pattern in (",", r"\$", "(?s).*#### ", r"\.$"):
            text = re.sub(pattern, "", text)
        return text

    found = re.search(r"#### (-?[0-9.,]+)", output)
    return found is not None and bare(found[1]) == bare(doc["answer"])


def grade_math(doc: dict, output: str) -> bool:
    """Compare the text between the first and the last $ with the boxed solution."""
    answer = output.split("$", 1)[1].rsplit("$", 1)[0] if output.count("$") > 1 else output
    gold = boxed(doc["solution"])
    try:
        return plain_latex(answer) == plain_latex(gold)
    except (ValueError, IndexError):  # not LaTeX that the rules know
        return answer == gold


def boxed(solution: str) -> str:
    """Content of the last \\boxed{...} or "\\boxed ...". Raises ValueError if there is none."""
    if "\\boxed " in solution:
        return solution.split("\\boxed ")[-1].split("$")[0]
    _, found, inside = solution.rpartition("\\boxed{")
    depth = 1
    for i, letter in enumerate(inside if found else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return inside[:i]
    raise ValueError("its solution has no \\boxed answer")


def plain_latex(text: str) -> str:
    """Write equal numbers equally, by the rules of the MATH paper (Hendrycks et al., 2021).

    Raises ValueError or IndexError if a rule does not apply.
    """
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"),
                     ("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""),
                     ("\\$", "")):  # fmt: skip
        text = text.replace(old, new)
    if "\\text{ " in text:  # a unit
        text, _unit = text.split("\\text{ ")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    left, *right = text.split("=")
    if len(right) == 1 and len(left) <= 2:  # "x = 3"
        text = right[0]
    first, *roots = text.split("\\sqrt")
    roots = [root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}" for root in roots]
    text = plain_fractions("\\sqrt".join([first, *roots]).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    if text.count("/") == 1:
        a, b = map(int, text.split("/"))
        text = f"\\frac{{{a}}}{{{b}}}" if text == f"{a}/{b}" else text
    return text


def plain_fractions(text: str) -> str:
    """\\frac12 and \\frac1{2} -> \\frac{1}{2}."""
    result, *parts = text.split("\\frac")
    for part in parts:
        if part[0] != "{":
            if len(part) < 2:
                return text
            below = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            part = f"{{{part[0]}}}{below}"
        result += "\\frac" + part
    return result


# -- The tasks ---------------------------------------------------------------------------------

ARC = lambda d: labelled(f"Question: {d['question']}\nAnswer:", d)
TASKS = {
    "wikitext": Task(
        "EleutherAI/wikitext_document_level wikitext-2-raw-v1 test", "word_perplexity",
        lambda d: choose("", [detokenize(d["page"])]), "none"),
    "arc_easy": Task("allenai/ai2_arc ARC-Easy test train", "acc_norm", ARC),
    "arc_challenge": Task("allenai/ai2_arc ARC-Challenge test train", "acc_norm", ARC),
    "boolq": Task("aps/super_glue boolq validation train", "acc", boolq, "others"),
    "hellaswag": Task("Rowan/hellaswag default validation train", "acc_norm", hellaswag, "others"),
    "openbookqa": Task("allenai/openbookqa main test train", "acc_norm",
        lambda d: labelled(d["question_stem"], d)),
    "piqa": Task("baber/piqa default validation train", "acc_norm", lambda d: choose(
        f"Question: {d['goal']}\nAnswer:", [d["sol1"], d["sol2"]], d["label"]), "others"),
    "winogrande": Task(
        "allenai/winogrande winogrande_xl validation train", "acc", winogrande, "others"),
    "mmlu": Task("cais/mmlu all test dev", "acc", mmlu, "first", shots=5, group="subject"),
    "gsm8k": Task("openai/gsm8k main test train", "exact_match",
        lambda d: choose(f"Question: {d['question']}\nAnswer:", [d["answer"]]),
        shots=5, stops=("Question:", "</s>", "<|im_end|>"), grade=grade_gsm8k),
    "math": Task("EleutherAI/hendrycks_math * test train", "exact_match",
        lambda d: choose(f"Problem: {d['problem']}\nAnswer:", [boxed(d["solution"])]),
        shots=5, stops=("Problem:",), grade=grade_math, group="type"),
    "humaneval": Task("openai/openai_humaneval openai_humaneval test", "pass@1",
        lambda d: choose(d["prompt"], [""]), "none",
        stops=("\nclass", "\ndef", "\n#", "\nif", "\nprint"), max_new_tokens=1024,
        program=lambda d, text: f"{d['prompt']}{text}\n{d['test']}\ncheck({d['entry_point']})"),
    "mbpp": Task(  # in the harness, examples start at the second item
        "google-research-datasets/mbpp full test prompt[1:]", "pass@1", mbpp, "first",
        stops=("[DONE]",), program=lambda d, text: "\n".join([text, *d["test_list"]])),
}  # fmt: skip

# -- Reading items -----------------------------------------------------------------------------


def read_questions(name: str, file: Path, limit: int | None = None) -> list[Question]:
    """Read items of a task, one JSON object per line, with the fields of the public dataset.

    Raises FileNotFoundError, or ValueError if the file is empty or a line is not such an item.
    """
    task, questions = TASKS[name], []
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; it should have the items of {task.source}")
    for number, line in enumerate(file.read_bytes().splitlines()[:limit], 1):
        try:
            doc = json.loads(line)
            group = doc[task.group] if task.group else ""
            question = task.ask(doc)._replace(doc=doc, group=group)
            if not 0 <= question.gold < len(question.choices):
                raise ValueError(f"no choice number {question.gold}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file}, line {number}: not an item of {name} ({error!r})") from None
        questions.append(question)
    if not questions:
        raise ValueError(f"{file}: is empty")
    return questions


def draw_examples(draw: str, question: Question, pool: list, n: int, generator) -> list[Question]:
    """Draw n examples from the pool as the harness does, with the same random numbers."""
    if draw == "first" or n == 0:
        return pool[:n]
    if draw == "any":
        return generator.sample(pool, n)
    return [shot for shot in generator.sample(pool, n + 1) if shot.doc != question.doc][:n]


def questions_of(name: str, folder: Path, shots: int, limit=None) -> list[Question]:
    """Read TASK.jsonl, and put `shots` examples from TASK.train.jsonl before every question."""
    task, questions = TASKS[name], read_questions(name, folder / f"{name}.jsonl", limit)
    pools, generators = defaultdict(list), defaultdict(lambda: random.Random(1234))
    if shots:
        for example in read_questions(name, folder / f"{name}.train.jsonl"):
            pools[example.group].append(example)
    intro = "The following are multiple choice questions (with answers) about {}.\n\n"
    space = "" if name == "mbpp" else " "
    for i, question in enumerate(questions):
        group, pool = question.group, pools[question.group]
        needed = shots + (task.draw == "others") if shots else 0
        if len(pool) < needed:
            raise ValueError(f"--num_fewshot {shots}: {name} {group} needs {needed} examples, "
                             f"but has {len(pool)}")  # fmt: skip
        before = intro.format(group.replace("_", " ")) if name == "mmlu" else ""
        for shot in draw_examples(task.draw, question, pool, shots, generators[group]):
            before += f"{shot.contexts[shot.gold]}{space}{shot.choices[shot.gold]}\n\n"
        questions[i] = question._replace(contexts=[before + text for text in question.contexts])
    return questions


def prepare(args, seq_len: int) -> dict[str, tuple[list[Question], int]]:
    """Read the items of all --tasks -> {task: (its questions, number of examples)}.

    Sets args.max_len, by default the seq_len of the model.
    """
    work, args.max_len = {}, args.max_len or seq_len
    if not args.data:
        raise ValueError("--tasks: needs --data, the folder of TASK.jsonl (see docs/evaluate.md)")
    for name in args.tasks.split(","):
        if name not in TASKS:
            raise ValueError(f"--tasks {name}: must be one of {', '.join(TASKS)}")
        task = TASKS[name]
        if task.stops and task.max_new_tokens >= args.max_len:
            room = f"leaves no room for a prompt beside {task.max_new_tokens} new tokens"
            raise ValueError(f"--tasks {name}: a window of {args.max_len} {room}")
        shots = task.shots if args.num_fewshot is None else args.num_fewshot
        shots = 0 if task.draw == "none" else shots
        work[name] = questions_of(name, Path(args.data), shots, args.limit), shots
    return work


# -- Questions to tokens -----------------------------------------------------------------------

Request = tuple[list[int], int]  # token ids, and how many at the end to score


def requests(tokenizer, question: Question, max_len: int) -> list[Request]:
    """Encode the choices after their contexts, keeping the last max_len + 1 tokens.

    The model reads all tokens but the last, so these fill a window of max_len. A space belongs to
    the word after it, so we score whitespace at the end of the context with the choice.
    """
    result = []
    for context, choice in zip(question.contexts, question.choices):
        before = tokenizer.encode_ordinary(context.rstrip())
        after = tokenizer.encode_ordinary(f"{context} {choice}")[len(before) :]
        ids = [*(before or [tokenizer.eot_token]), *after][-(max_len + 1) :]
        result.append((ids, min(len(after), len(ids) - 1)))
    return result


def windows(tokenizer, question: Question, max_len: int) -> list[Request]:
    """Cut a long text, the only choice, into windows that score every token once.

    The first token of a full window has only one token of context. We fill up the last window, if
    it is shorter, with earlier tokens.
    """
    ids, result = [tokenizer.eot_token, *tokenizer.encode_ordinary(question.choices[0])], []
    for start in range(1, len(ids), max_len):
        end = min(start + max_len, len(ids))
        result.append((ids[max(0, end - max_len - 1) : end], end - start))
    return result


# -- Answers to scores -------------------------------------------------------------------------


def measure(name: str, questions: list[Question], answers: list) -> dict:
    """Return {metric: value, metric_stderr: its standard error} of a task.

    An answer is a list of log-likelihoods in nats, of the choices or of the windows of a page, or
    the text that the model wrote.
    """
    task = TASKS[name]
    if task.metric == "word_perplexity":  # per word of the pages before detokenization
        words = sum(len(re.split(r"\s+", q.doc["page"])) for q in questions)
        return {task.metric: math.exp(-sum(map(math.fsum, answers)) / words)}
    pairs = zip(questions, answers)
    if task.grade:
        right = [task.grade(question.doc, text) for question, text in pairs]
    else:
        right = [is_right(question, sums, task.metric) for question, sums in pairs]
    mean, stderr = mean_and_stderr(right, [question.group for question in questions])
    return {task.metric: mean, f"{task.metric}_stderr": stderr}


def is_right(question: Question, sums: list[float], metric: str) -> bool:
    """Is the most likely choice right? acc_norm divides by the number of characters."""
    if metric == "acc_norm":
        sums = [nats / max(1, len(text)) for nats, text in zip(sums, question.choices)]
    return int(np.argmax(sums)) == question.gold  # argmax takes the first on ties


def mean_and_stderr(values: list, groups: list[str]) -> tuple[float, float | None]:
    """The mean, and its standard error from the spread of the values around their group's mean."""
    members = defaultdict(list)
    for value, group in zip(values, groups):
        members[group].append(float(value))
    squares = sum(len(some) * np.var(some) for some in members.values())
    freedom = len(values) - len(members)
    return float(np.mean(values)), math.sqrt(squares / freedom / len(values)) if freedom else None


def write_samples(name: str, questions: list[Question], texts: list[str], file: Path) -> None:
    """Write the code of a model, and the program that tests it, one JSON object per line.

    HumanEval's scorer reads task_id and completion. We never run the code.
    """
    with open(file, "w", encoding="utf-8") as lines:
        for question, text in zip(questions, texts):
            program = TASKS[name].program(question.doc, text)
            sample = dict(task_id=question.doc["task_id"], completion=text, program=program)
            lines.write(json.dumps(sample) + "\n")
