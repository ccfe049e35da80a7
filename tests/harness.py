"""lm-evaluation-harness without a network: its tasks and its model class, on our items.

The items are few and nasty, with several kinds of labels, an empty context, ties, spaces
around choices, and a text longer than the window.
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
WORDS = """the a river stone quickly blue 12 3.5 naïve café 東京 of ? , ; don't (see) [x]
"so" -- it's €5 x=1 \\frac{1}{2} $2,000""".split()

# -- Item number i of every task, in the fields of the public dataset --------------------

rng = random.Random(0)


def text(least: int = 1, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def labelled(i: int, labels: str) -> dict:
    """Choices with labels, and the label of the right one."""
    texts = [f" {text(1, 8)}" + " " * (i % 3) for _ in labels]
    if i % 4 == 2:  # all equally likely
        texts = [texts[0]] * len(labels)
    choices = {"text": texts, "label": list(labels)}
    return {"choices": choices, "answerKey": rng.choice(labels)}


def arc(i: int) -> dict:
    labels = ["ABCD", "1234", "ABC", "ABCDE"][i % 4]
    return {"question": text(0, 30)} | labelled(i, labels)


def openbookqa(i: int) -> dict:
    # no context, and one longer than the window
    stem = {5: "", 6: text(200, 300)}.get(i, text(1, 30) + " " * (i % 3))
    return {"question_stem": stem} | labelled(i, "ABCD")


def boolq(i: int) -> dict:
    return {"passage": text(10, 40) + " ", "question": text(), "label": i % 2}


def hellaswag(i: int) -> dict:
    ctx_a = f" [header] {text()} [title] {text()}"
    item = {"ind": i, "activity_label": text(1, 3), "ctx_a": ctx_a}
    item["ctx_b"] = ["", text(), "ÉCOLE dort"][i % 3]
    endings = [f"{text()} [substeps] {text()}  {text()} ", f" [title] {text()}", text()]
    return item | {"endings": endings, "label": str(rng.randrange(3))}


def piqa(i: int) -> dict:
    sol2 = text() + " " * (i % 2)
    return {"goal": text(0, 20), "sol1": text(), "sol2": sol2, "label": 0}


def winogrande(i: int) -> dict:
    item = {"sentence": f"{text()} _ {text()}{' ' * (i % 3)}", "answer": rng.choice("12")}
    return item | {"option1": text(1, 2), "option2": text(1, 3)}


def mmlu(i: int) -> dict:
    item = {"question": " " * (i % 2) + text(3, 20) + "\n" * (i % 3)}
    item["choices"] = [text(1, 5) for _ in "ABCD"]
    return item | {"answer": rng.randrange(4), "subject": SUBJECTS[i % 3]}


def wikitext(i: int) -> dict:
    page = f" = {text(1, 3)} = \n = = = Deep = = = \n\n"
    for _ in range(i + 1):
        page += f" {text()} , the 1 @,@ 000 @-@ year 3 @.@ 5 ' s ' dogs ' ( a {text()} ) "
        page += f"[ 7 ] \" {text(1, 4)} \" : 20 ° N ; it 's ! an N /' 3/ \n"
    return {"page": page}


def all_items() -> dict[str, list[dict]]:
    """Name of a file -> its 12 items. mmlu has examples too, 6 of each subject."""
    rng.seed(0)
    found = {name: [arc(i) for i in range(12)] for name in ("arc_easy", "arc_challenge")}
    for make in (boolq, hellaswag, openbookqa, piqa, winogrande, mmlu, wikitext):
        found[make.__name__] = [make(i) for i in range(12)]
    return found | {"mmlu.dev": [mmlu(i) for i in range(18)]}


def write(folder: Path, files: dict[str, list[dict]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, items in files.items():
        lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in items]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def train_tokenizer(path, texts: list[str], size: int, end="<|endoftext|>") -> None:
    """Write a tokenizer.json, byte-level BPE, that adds a token before every text."""
    import tokenizers

    library = tokenizers.ByteLevelBPETokenizer()
    settings = dict(vocab_size=size, special_tokens=[end], show_progress=False)
    library.train_from_iterator(texts, **settings)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, library.token_to_id(end))]
    )
    library.save(str(path))


# -- The harness -------------------------------------------------------------------------

DEFINITIONS = {  # where lm_eval/tasks has them, if not in NAME/NAME.yaml
    "arc_easy": "arc/arc_easy",
    "arc_challenge": "arc/arc_challenge",
    "boolq": "super_glue/boolq/default",
    "winogrande": "winogrande/default",
}


def make_task(name: str, subject: str, files: dict[str, list[dict]]):
    """A task as the harness defines it, with our items instead of its download."""
    import lm_eval.tasks
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    def items_of(file: str) -> Dataset:
        items = [x for x in files[file] if x.get("subject", subject) == subject]
        return Dataset.from_list(items)

    items = items_of(name)
    splits = DatasetDict(test=items, validation=items, train=items)
    file = DEFINITIONS.get(name, f"{name}/{name}")
    if name == "mmlu":
        file = f"mmlu/default/mmlu_{subject}"
        splits["dev"] = items_of("mmlu.dev")
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / f"{file}.yaml")
    config |= {"custom_dataset": lambda **_: splits, "task": f"{name} {subject}"}
    task = ConfigurableTask(config=config)
    task.set_config(key="num_fewshot", value=5 if name == "mmlu" else 0)
    task.set_fewshot_seed(seed=1234)
    return task


def run_harness(model: Path, names: list[str]) -> dict[str, list[tuple]]:
    """Evaluate as lm_eval.simple_evaluate does, without its survey of the machine.

    Returns name -> (its metrics, its samples) of every subject.
    """
    import lm_eval.evaluator
    from lm_eval.models.huggingface import HFLM

    logging.disable(logging.WARNING)
    files = all_items()
    tasks = {}
    for name in names:
        for subject in SUBJECTS if name == "mmlu" else [""]:
            tasks[f"{name} {subject}"] = make_task(name, subject, files)
    options = dict(device="cpu", dtype="float32", max_length=MAX_LEN, batch_size=8)
    reader = HFLM(pretrained=str(model), **options)
    work = {"tasks": tasks, "groups": {}, "group_map": {}}
    output = lm_eval.evaluator.evaluate(reader, work, bootstrap_iters=2)
    logging.disable(logging.NOTSET)
    found = {name: [] for name in names}
    for key in tasks:
        name, _ = key.split(" ")
        found[name].append((output["results"][key], output["samples"][key]))
    return found
