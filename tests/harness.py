"""The harness itself, offline: its own task definitions over local items, and our model in its own `hf` class.

Also the items: in the public data sets' fields, the nasty ones among them.
"""

import json
import os
import random
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DISABLE_MULTIPROC": "1"}

WORDS = "the a river stone quickly blue 12 3.5 naïve café 東京 of ? , ; don't (see) [x] \"so\" -- it's €5 x=1 \\frac{1}{2} $2,000".split(" ")


def text(rng: random.Random, least: int = 1, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def items(seed: int = 0, n: int = 12) -> dict[str, list[dict]]:
    """File name -> its lines."""
    rng = random.Random(seed)
    some = lambda make, n=n: [make(i) for i in range(n)]

    def with_labels(i, question, labels, start=""):
        texts = [text(rng, 1, 8) for _ in labels]
        if i % 4 == 1:
            texts[0] = "  " + texts[0] + " "  # spaces around
        if i % 4 == 2:
            texts = [texts[0]] * len(labels)  # a tie
        return {"id": str(i), question: text(rng, 0 if question == "question" else 1, 30), "choices": {"text": texts, "label": labels}, "answerKey": start + rng.choice(labels)}

    labels = lambda i: [list("ABCD"), list("1234"), list("ABC"), list("ABCDE")][i % 4]
    arc = lambda i: with_labels(i, "question", labels(i))

    def obqa(i):
        doc = with_labels(i, "question_stem", list("ABCD"), " " * (i % 3))
        doc["question_stem"] += ["", " ", "\n"][i % 3]
        if i == 5:
            doc["question_stem"] = ""  # nothing in front of the choices
        if i == 6:
            doc["question_stem"] = text(rng, 200, 300)  # longer than the window
        return doc

    def hella(i):
        endings = [f"{text(rng)} [substeps] {text(rng)}  {text(rng)} ", f" [title] {text(rng)}", text(rng), f"{text(rng)} [title] {text(rng)} [step]"]
        return {
            "ind": i, "activity_label": text(rng, 1, 3), "ctx_a": f" [header] {text(rng)} [title] {text(rng)}" if i % 2 else text(rng),
            "ctx_b": rng.choice(["", text(rng), "ÉCOLE dort"]), "endings": endings, "label": str(rng.randrange(4)),
        }  # fmt: skip

    def wino(i):
        return {"sentence": f"{text(rng)} _ {text(rng)}{' ' * (i % 3)}", "option1": text(rng, 1, 2), "option2": text(rng, 1, 3), "answer": rng.choice("12")}

    subjects = ["abstract_algebra", "anatomy", "virology"]
    question = lambda i, subjects=subjects: {
        "question": " " * (i % 2) + text(rng, 3, 20) + "\n" * (i % 3), "subject": subjects[i % 3], "choices": [text(rng, 1, 5) for _ in "ABCD"], "answer": rng.randrange(4),
    }  # fmt: skip

    def grade_school(i):
        number = rng.choice(["5", "1,200", "$7", "-3", "2.50", "12."])
        return {"question": text(rng, 3, 20), "answer": f"{text(rng)} <<1+1=2>> {text(rng)}\n#### {number}"}

    def page(i):
        lines = [f" = {text(rng, 1, 3)} = \n", f" = = {text(rng, 1, 3)} = = \n", " = = = Deep = = = \n", "\n"]
        sentence = lambda: f" {text(rng)} , the 1 @,@ 000 @-@ year 3 @.@ 5 ' s ' dogs ' ( a {text(rng, 1, 3)} ) [ 7 ] \" {text(rng, 1, 4)} \" : 20 ° N ; it 's ! \n"
        return {"page": "".join(rng.choice([rng.choice(lines), sentence()]) for _ in range(rng.randint(1, 12)))}

    def mathematics(i):
        boxed = ["\\boxed{\\frac{1}{2}}", "\\boxed{\\frac{\\sqrt{3}}{2}}", "\\fbox{1} \\boxed{x=5}", "\\boxed{12\\%}", "$\\boxed 7$.", "\\boxed{1,\\!000\\text{ cm}}"][i % 6]
        return {"problem": text(rng, 3, 20), "level": "Level 1", "type": ["Algebra", "Geometry"][i % 2], "solution": f"{text(rng)} \\boxed{{0}} so {boxed}"}

    code = lambda i: {
        "task_id": f"HumanEval/{i}", "prompt": f"def f{i}(x):\n    \"\"\" {text(rng)} \"\"\"\n", "test": f"def check(f):\n    assert f(1) == {i}\n",
        "entry_point": f"f{i}", "canonical_solution": f"    return {i}\n",
    }  # fmt: skip
    basic = lambda i: {"task_id": i, "text": text(rng), "code": f"def g(x):\r\n    return {i}", "test_list": [f"assert g({k}) == {i}" for k in range(3)],
                       "test_setup_code": "", "challenge_test_list": []}  # fmt: skip
    boolean = lambda i: {"question": text(rng), "passage": text(rng, 10, 40) + " " * (i % 2), "idx": i, "label": i % 2}
    physical = lambda i: {"goal": text(rng, 0, 20), "sol1": text(rng), "sol2": text(rng) + " " * (i % 2), "label": i % 2}
    files = {
        "arc_easy": some(arc), "arc_easy.train": some(arc), "arc_challenge": some(arc), "arc_challenge.train": some(arc),
        "boolq": some(boolean), "boolq.train": some(boolean), "hellaswag": some(hella), "hellaswag.train": some(hella),
        "openbookqa": some(obqa), "openbookqa.train": some(obqa), "piqa": some(physical), "piqa.train": some(physical),
        "winogrande": some(wino), "winogrande.train": some(wino), "wikitext": some(page, 5), "mmlu": some(question), "mmlu.dev": some(question, 18),
        "gsm8k": some(grade_school, 6), "gsm8k.train": some(grade_school), "math": some(mathematics, 6), "math.train": some(mathematics, 18),
        "humaneval": some(code, 4), "mbpp": some(basic, 4), "mbpp.train": some(basic, 5),
    }  # fmt: skip
    for name in ("boolq", "piqa", "winogrande", "hellaswag"):  # an item among its own examples
        files[f"{name}.train"][3:7] = [*files[name][2:4], *files[name][2:4]]  # and twice
    return files


def write(folder: Path, files: dict[str, list[dict]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, docs in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs), encoding="utf-8")
    return folder


HARNESS_FILES = {  # the harness's definition of each task, and the names of its splits
    "arc_easy": ("arc/arc_easy", "test", "train"), "arc_challenge": ("arc/arc_challenge", "test", "train"),
    "boolq": ("super_glue/boolq/default", "validation", "train"), "hellaswag": ("hellaswag/hellaswag", "validation", "train"),
    "openbookqa": ("openbookqa/openbookqa", "test", "train"), "piqa": ("piqa/piqa", "validation", "train"),
    "winogrande": ("winogrande/default", "validation", "train"), "wikitext": ("wikitext/wikitext", "test", "train"),
    "mmlu": ("mmlu/default/mmlu_{}", "test", "dev"), "gsm8k": ("gsm8k/gsm8k", "test", "train"),
    "math": ("hendrycks_math/hendrycks_math_{}", "test", "train"), "humaneval": ("humaneval/humaneval", "test", "train"), "mbpp": ("mbpp/mbpp", "test", "train"),
}  # fmt: skip


WRITTEN, SHORT = {"gsm8k": 256, "math": 256, "humaneval": 1024, "mbpp": 256}, 24  # tokens that the model may write; in these tests


def harness_task(name: str, files: dict[str, list[dict]], group: str = "") -> dict:
    """The harness's own configuration of a task, with our items in place of the download."""
    import datasets
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    file, split, train_split = HARNESS_FILES[name]
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / f"{file.format(group.lower())}.yaml")
    mine = lambda docs: [doc for doc in docs if not group or group in doc.values()]
    splits = {split: mine(files[name])}
    splits[train_split] = mine(files.get(f"{name}.{'dev' if name == 'mmlu' else 'train'}", files[name]))
    if name in WRITTEN:  # shorter than the harness would let it write, to save time
        assert config["generation_kwargs"].get("max_gen_toks", 256) == WRITTEN[name]
        config["generation_kwargs"]["max_gen_toks"] = SHORT
    return config | {"custom_dataset": lambda **_: datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in splits.items()})}


def harness_model(folder: Path, max_len: int, batch_size: int = 8):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=max_len, batch_size=batch_size)


def run_harness(model, files: dict[str, list[dict]], names: list[tuple[str, str]], shots: dict[str, int]) -> tuple[dict, dict]:
    """Evaluate as lm_eval.simple_evaluate does, which also takes half a minute to look at the machine. names: (task, group).

    -> its metrics and its samples, (task, group) -> dict, and list in the order of the items.
    """
    import lm_eval.evaluator
    from lm_eval.api.task import ConfigurableTask

    tasks = {}
    for name, group in names:
        task = tasks[f"{name} {group}"] = ConfigurableTask(config=harness_task(name, files, group) | {"task": f"{name} {group}"})
        task.set_config(key="num_fewshot", value=shots[name])
        task.set_fewshot_seed(seed=1234)
    output = lm_eval.evaluator.evaluate(model, {"tasks": tasks, "groups": {}, "group_map": {}}, bootstrap_iters=2, confirm_run_unsafe_code=True)
    by_name = lambda part: {tuple(key.split(" ")): value for key, value in output[part].items()}
    samples = {key: sorted(some, key=lambda sample: sample["doc_id"]) for key, some in by_name("samples").items()}
    return by_name("results"), samples
