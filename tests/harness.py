"""lm-evaluation-harness without a network: its tasks and its model class, on our items.

The items are few and nasty. They have the oddities of the real ones, such as labels from 1
to 4, empty contexts, ties, and texts longer than the window.
"""

import json
import logging
import os
import random
from pathlib import Path

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_MULTIPROC"):
    os.environ[name] = "1"

MAX_LEN = 320  # the window in these tests
SUBJECTS = ["abstract_algebra", "anatomy", "virology"]
WORDS = """the a river stone quickly blue 12 3.5 naïve café 東京 of ? , ; don't (see) [x] "so" --
it's €5 x=1 \\frac{1}{2} $2,000""".split()

# -- Items -------------------------------------------------------------------------------


class Items:
    """Makes item number i of every task, in the fields of the public dataset."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def text(self, least: int = 1, most: int = 12) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(least, most)))

    def texts(self, n: int) -> list[str]:
        return [self.text(1, 8) for _ in range(n)]

    def labelled(self, i: int, labels: str) -> dict:
        """Choices with labels, and the label of the right one."""
        texts = self.texts(len(labels))
        if i % 4 == 1:  # spaces around a choice
            texts[0] = f"  {texts[0]} "
        if i % 4 == 2:  # all equally likely
            texts = [texts[0]] * len(labels)
        choices = {"text": texts, "label": list(labels)}
        return {"choices": choices, "answerKey": self.rng.choice(labels)}

    def arc(self, i: int) -> dict:
        labels = ["ABCD", "1234", "ABC", "ABCDE"][i % 4]
        return {"question": self.text(0, 30)} | self.labelled(i, labels)

    def openbookqa(self, i: int) -> dict:
        stem = self.text(1, 30) + ["", " ", "\n"][i % 3]
        if i == 5:
            stem = ""
        if i == 6:  # longer than the window
            stem = self.text(200, 300)
        item = {"question_stem": stem} | self.labelled(i, "ABCD")
        item["answerKey"] = " " * (i % 3) + item["answerKey"]
        return item

    def boolq(self, i: int) -> dict:
        passage = self.text(10, 40) + " " * (i % 2)
        return {"passage": passage, "question": self.text(), "label": i % 2}

    def hellaswag(self, i: int) -> dict:
        before = self.text()
        if i % 2:
            before = f" [header] {self.text()} [title] {self.text()}"
        endings = [
            f"{self.text()} [substeps] {self.text()}  {self.text()} ",
            f" [title] {self.text()}",
            self.text(),
            f"{self.text()} [title] {self.text()} [step]",
        ]
        return {
            "activity_label": self.text(1, 3),
            "ctx_a": before,
            "ctx_b": ["", self.text(), "ÉCOLE dort"][i % 3],
            "endings": endings,
            "label": str(self.rng.randrange(4)),
            "ind": i,
        }

    def piqa(self, i: int) -> dict:
        sol2 = self.text() + " " * (i % 2)
        return {"goal": self.text(0, 20), "sol1": self.text(), "sol2": sol2, "label": 0}

    def winogrande(self, i: int) -> dict:
        return {
            "sentence": f"{self.text()} _ {self.text()}{' ' * (i % 3)}",
            "option1": self.text(1, 2),
            "option2": self.text(1, 3),
            "answer": self.rng.choice("12"),
        }

    def mmlu(self, i: int) -> dict:
        return {
            "question": " " * (i % 2) + self.text(3, 20) + "\n" * (i % 3),
            "subject": SUBJECTS[i % 3],
            "choices": self.texts(4),
            "answer": self.rng.randrange(4),
        }

    def wikitext(self, i: int) -> dict:
        lines = [f" = {self.text(1, 3)} = \n", " = = = Deep = = = \n", "\n"]
        for _ in range(i + 1):
            lines.append(
                f" {self.text()} , the 1 @,@ 000 @-@ year 3 @.@ 5 ' s ' dogs ' "
                f'( a {self.text()} ) [ 7 ] " {self.text(1, 4)} " : 20 ° N ; it \'s ! \n'
            )
        return {"page": "".join(lines)}


def all_items() -> dict[str, list[dict]]:
    """Name of a file -> its 12 items. mmlu has examples too, 6 of each subject."""
    make = Items(seed=0)
    files = {
        "wikitext": make.wikitext,
        "arc_easy": make.arc,
        "arc_challenge": make.arc,
        "boolq": make.boolq,
        "hellaswag": make.hellaswag,
        "openbookqa": make.openbookqa,
        "piqa": make.piqa,
        "winogrande": make.winogrande,
        "mmlu": make.mmlu,
        "mmlu.dev": make.mmlu,
    }
    found = {}
    for name, make_item in files.items():
        found[name] = [make_item(i) for i in range(18 if name == "mmlu.dev" else 12)]
    return found


def write(folder: Path, files: dict[str, list[dict]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, items in files.items():
        lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in items]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


# -- A tokenizer -------------------------------------------------------------------------


def train_tokenizer(path: Path, texts: list[str], size: int) -> None:
    """Write a tokenizer.json, byte-level BPE, that adds a token before every text."""
    import tokenizers

    end = "<|endoftext|>"
    library = tokenizers.ByteLevelBPETokenizer()
    library.train_from_iterator(
        texts, vocab_size=size, special_tokens=[end], show_progress=False
    )
    template = tokenizers.processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, library.token_to_id(end))]
    )
    library._tokenizer.post_processor = template
    library.save(str(path))


# -- The harness -------------------------------------------------------------------------

DEFINITIONS = {  # where lm_eval/tasks has them, if not in NAME/NAME.yaml
    "arc_easy": "arc/arc_easy",
    "arc_challenge": "arc/arc_challenge",
    "boolq": "super_glue/boolq/default",
    "winogrande": "winogrande/default",
}


def make_task(name: str, subject: str, files: dict[str, list[dict]]):
    """A task of the harness as it defines it, with our items instead of its download."""
    import lm_eval.tasks
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    file = DEFINITIONS.get(name, f"{name}/{name}")
    items = files[name]
    examples = items  # unused without shots
    if name == "mmlu":
        file = f"mmlu/default/mmlu_{subject}"
        items = [item for item in items if item["subject"] == subject]
        examples = [item for item in files["mmlu.dev"] if item["subject"] == subject]
    items = Dataset.from_list(items)
    examples = Dataset.from_list(examples)
    splits = DatasetDict(test=items, validation=items, train=examples, dev=examples)
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / f"{file}.yaml")
    config["custom_dataset"] = lambda **_: splits
    config["task"] = f"{name} {subject}"
    task = ConfigurableTask(config=config)
    task.set_config(key="num_fewshot", value=5 if name == "mmlu" else 0)
    task.set_fewshot_seed(seed=1234)
    return task


def run_harness(model: Path, tasks: list[tuple[str, str]]) -> tuple[dict, dict]:
    """Evaluate as lm_eval.simple_evaluate does, without its survey of the machine.

    tasks: (name, subject) of each. Returns its metrics, (name, subject) -> dict, and its
    samples, (name, subject) -> list of dicts.
    """
    import lm_eval.evaluator
    from lm_eval.models.huggingface import HFLM

    logging.disable(logging.WARNING)
    options = dict(device="cpu", dtype="float32", max_length=MAX_LEN, batch_size=8)
    reader = HFLM(pretrained=str(model), **options)
    files = all_items()
    work = {}
    for name, subject in tasks:
        work[f"{name} {subject}"] = make_task(name, subject, files)
    task_dict = {"tasks": work, "groups": {}, "group_map": {}}
    output = lm_eval.evaluator.evaluate(reader, task_dict, bootstrap_iters=2)
    logging.disable(logging.NOTSET)
    metrics = {tuple(key.split(" ")): x for key, x in output["results"].items()}
    samples = {tuple(key.split(" ")): x for key, x in output["samples"].items()}
    return metrics, samples
