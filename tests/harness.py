"""lm-evaluation-harness offline: its task definitions and our model, over local, nasty items."""

import json
import logging
import os
import random
from pathlib import Path

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_MULTIPROC"):
    os.environ[name] = "1"

WORDS = """the a river stone quickly blue 12 3.5 naïve café 東京 of ? , ; don't (see) [x] "so" --
it's €5 x=1 \\frac{1}{2} $2,000""".split()
FILES = {  # the harness's definitions of tasks, if not NAME/NAME
    "arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_challenge",
    "boolq": "super_glue/boolq/default", "winogrande": "winogrande/default",
    "mmlu": "mmlu/default/mmlu_{}",
}  # fmt: skip
MAX_LEN = 320  # in these tests


def text(rng: random.Random, least: int = 1, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def items() -> dict[str, list[dict]]:
    """File name -> its lines."""
    rng, files = random.Random(0), {}
    for kind, most in (("", 12), (".train", 18)):
        docs = [item(rng, i) for i in range(most)]
        for name in docs[0]:
            files[f"{name}{kind}"] = [doc[name] for doc in docs]
    files["mmlu.dev"] = files.pop("mmlu.train")
    # an item among its own examples,
    for name in (
        "boolq",
        "piqa",
        "winogrande",
        "hellaswag",
    ):
        files[f"{name}.train"][3:7] = files[name][2:4] * 2  # and twice
    return files


def item(rng: random.Random, i: int) -> dict[str, dict]:
    """Item i of each task."""
    some = lambda least=1, most=12: text(rng, least, most)

    def labelled(labels):
        texts = [some(1, 8) for _ in labels]
        if i % 4 == 1:
            texts[0] = f"  {texts[0]} "  # spaces around it
        if i % 4 == 2:
            texts = [texts[0]] * len(labels)  # a tie
        return {
            "choices": {"text": texts, "label": list(labels)},
            "answerKey": rng.choice(labels),
        }

    arc = lambda: (
        {"question": some(0, 30)} | labelled(["ABCD", "1234", "ABC", "ABCDE"][i % 4])
    )
    stem = some(1, 30) + ["", " ", "\n"][i % 3]
    stem = {5: "", 6: some(200, 300)}.get(i, stem)  # no context; longer than the window
    openbookqa = {"question_stem": stem} | labelled("ABCD")
    openbookqa["answerKey"] = " " * (i % 3) + openbookqa["answerKey"]
    endings = [f"{some()} [substeps] {some()}  {some()} ", f" [title] {some()}", some()]
    sentence = lambda: (f" {some()} , the 1 @,@ 000 @-@ year 3 @.@ 5 ' s ' dogs ' ( a {some()} ) "
                        f'[ 7 ] " {some(1, 4)} " : 20 ° N ; it \'s ! \n')  # fmt: skip
    lines = lambda: [
        f" = {some(1, 3)} = \n",
        " = = = Deep = = = \n",
        "\n",
        sentence(),
        sentence(),
    ]
    return {
        "arc_easy": arc(), "arc_challenge": arc(), "openbookqa": openbookqa,
        "boolq": {"question": some(), "passage": some(10, 40) + " " * (i % 2), "label": i % 2},
        "hellaswag": {"activity_label": some(1, 3), "label": str(rng.randrange(4)),
            "ctx_a": f" [header] {some()} [title] {some()}" if i % 2 else some(),
            "ctx_b": rng.choice(["", some(), "ÉCOLE dort"]), "ind": i,
            "endings": [*endings, f"{some()} [title] {some()} [step]"]},
        "piqa": {"goal": some(0, 20), "sol1": some(), "sol2": some() + " " * (i % 2), "label": 0},
        "winogrande": {"sentence": f"{some()} _ {some()}{' ' * (i % 3)}", "option1": some(1, 2),
            "option2": some(1, 3), "answer": rng.choice("12")},
        "mmlu": {"question": " " * (i % 2) + some(3, 20) + "\n" * (i % 3),
            "subject": ["abstract_algebra", "anatomy", "virology"][i % 3],
            "choices": [some(1, 5) for _ in "ABCD"], "answer": rng.randrange(4)},
        "wikitext": {"page": "".join(rng.choice(lines()) for _ in range(rng.randint(1, 12)))},
    }  # fmt: skip


def write(folder: Path, files: dict[str, list[dict]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, docs in files.items():
        lines = "".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def definition(name: str, group: str = "", **options) -> dict:
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    file = FILES.get(name, f"{name}/{name}").format(group.lower())
    return load_yaml(Path(lm_eval.tasks.__file__).parent / f"{file}.yaml", **options)


def harness_task(name: str, files: dict[str, list[dict]], group: str = "") -> dict:
    """The harness's configuration of a task, with our items in place of the download."""
    from datasets import Dataset, DatasetDict

    config, key = (
        definition(name, group),
        "mmlu.dev" if name == "mmlu" else f"{name}.train",
    )
    mine = lambda docs: [doc for doc in docs if not group or group in doc.values()]
    items, examples = (
        Dataset.from_list(mine(files[name])),
        Dataset.from_list(mine(files[key])),
    )
    ours = DatasetDict(test=items, validation=items, train=examples, dev=examples)
    return config | {"custom_dataset": lambda **_: ours}


def run_harness(folder: Path, files: dict, names: list[tuple[str, str]], shots: int):
    """Evaluate as lm_eval.simple_evaluate does, without its survey of the machine.

    names: (task, group). -> its metrics, (task, group) -> dict, and its samples, -> list of dicts.
    """
    import lm_eval.evaluator
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    logging.disable(logging.WARNING)
    options = dict(device="cpu", dtype="float32", max_length=MAX_LEN, batch_size=8)
    model = HFLM(pretrained=str(folder), **options)
    tasks = {}
    for name, group in names:
        key = f"{name} {group}"
        task = ConfigurableTask(config=harness_task(name, files, group) | {"task": key})
        task.set_config(key="num_fewshot", value=0 if name == "wikitext" else shots)
        task.set_fewshot_seed(seed=1234)
        tasks[key] = task
    work = {"tasks": tasks, "groups": {}, "group_map": {}}
    output = lm_eval.evaluator.evaluate(model, work, bootstrap_iters=2)
    logging.disable(logging.NOTSET)
    by_name = lambda part: {
        tuple(key.split(" ")): value for key, value in output[part].items()
    }
    return by_name("results"), by_name("samples")
