"""lm-evaluation-harness offline: its task definitions over local items, our model in its class.

Also the items themselves, in the fields of the public data sets, the nasty ones among them.
"""

import json
import os
import random
from pathlib import Path

import data
from model import export_granite

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_MULTIPROC")
os.environ |= dict.fromkeys(OFFLINE, "1") | {"TOKENIZERS_PARALLELISM": "false"}

WORDS = (
    "the a river stone quickly blue 12 3.5 naïve café 東京 of ? , ; don't (see) [x] \"so\" -- it's "
    "€5 x=1 \\frac{1}{2} $2,000"
).split(" ")
TASK_FILES = {  # the harness's definition of each task, and the names of its splits
    "arc_easy": "arc/arc_easy test train", "arc_challenge": "arc/arc_challenge test train",
    "boolq": "super_glue/boolq/default validation train", "piqa": "piqa/piqa validation train",
    "hellaswag": "hellaswag/hellaswag validation train",
    "openbookqa": "openbookqa/openbookqa test train", "gsm8k": "gsm8k/gsm8k test train",
    "winogrande": "winogrande/default validation train", "wikitext": "wikitext/wikitext test train",
    "mmlu": "mmlu/default/mmlu_{} test dev", "humaneval": "humaneval/humaneval test train",
    "math": "hendrycks_math/hendrycks_math_{} test train", "mbpp": "mbpp/mbpp test train",
}  # fmt: skip
WRITTEN = {"gsm8k": 256, "math": 256, "humaneval": 1024, "mbpp": 256}  # tokens a model may write
SHORT = 24  # in these tests


def text(rng: random.Random, least: int = 1, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def items(seed: int = 0) -> dict[str, list[dict]]:
    """File name -> its lines."""
    rng, counts = random.Random(seed), {"wikitext": 5, "gsm8k": 6, "math": 6, "mbpp": 4, "humaneval": 4}
    kinds = dict(arc_easy=arc, arc_challenge=arc, boolq=boolq, hellaswag=hellaswag,
        openbookqa=openbookqa, piqa=piqa, winogrande=winogrande, mmlu=mmlu, gsm8k=gsm8k,
        math=math, mbpp=mbpp, humaneval=humaneval, wikitext=wikitext)  # fmt: skip
    files = {name: [one(rng, i) for i in range(counts.get(name, 12))] for name, one in kinds.items()}
    for name, one in kinds.items():
        files[f"{name}.{'dev' if name == 'mmlu' else 'train'}"] = [one(rng, i) for i in range(18)]
    for name in ("boolq", "piqa", "winogrande", "hellaswag"):  # an item among its own examples,
        files[f"{name}.train"][3:7] = files[name][2:4] * 2  # and twice
    return files


def labelled(rng, i, labels) -> dict:
    texts = [text(rng, 1, 8) for _ in labels]
    if i % 4 == 1:
        texts[0] = f"  {texts[0]} "  # spaces around it
    if i % 4 == 2:
        texts = [texts[0]] * len(labels)  # a tie
    return {"choices": {"text": texts, "label": labels}, "answerKey": rng.choice(labels)}


def arc(rng, i):
    labels = [list("ABCD"), list("1234"), list("ABC"), list("ABCDE")][i % 4]
    return {"id": str(i), "question": text(rng, 0, 30)} | labelled(rng, i, labels)


def openbookqa(rng, i):
    doc = {"id": str(i), "question_stem": text(rng, 1, 30)} | labelled(rng, i, list("ABCD"))
    doc["answerKey"] = " " * (i % 3) + doc["answerKey"]
    doc["question_stem"] += ["", " ", "\n"][i % 3]
    if i == 5:
        doc["question_stem"] = ""  # no context at all
    if i == 6:
        doc["question_stem"] = text(rng, 200, 300)  # longer than the window
    return doc


def boolq(rng, i):
    passage = text(rng, 10, 40) + " " * (i % 2)
    return {"question": text(rng), "passage": passage, "idx": i, "label": i % 2}


def hellaswag(rng, i):
    some = lambda: text(rng)
    endings = [f"{some()} [substeps] {some()}  {some()} ", f" [title] {some()}", some()]
    endings.append(f"{some()} [title] {some()} [step]")
    start = f" [header] {some()} [title] {some()}" if i % 2 else some()
    return {
        "ind": i, "activity_label": text(rng, 1, 3), "ctx_a": start, "endings": endings,
        "ctx_b": rng.choice(["", some(), "ÉCOLE dort"]), "label": str(rng.randrange(4)),
    }  # fmt: skip


def piqa(rng, i):
    second = text(rng) + " " * (i % 2)
    return {"goal": text(rng, 0, 20), "sol1": text(rng), "sol2": second, "label": i % 2}


def winogrande(rng, i):
    options = {"option1": text(rng, 1, 2), "option2": text(rng, 1, 3), "answer": rng.choice("12")}
    return {"sentence": f"{text(rng)} _ {text(rng)}{' ' * (i % 3)}"} | options


def mmlu(rng, i):
    return {
        "question": " " * (i % 2) + text(rng, 3, 20) + "\n" * (i % 3), "answer": rng.randrange(4),
        "subject": ["abstract_algebra", "anatomy", "virology"][i % 3],
        "choices": [text(rng, 1, 5) for _ in "ABCD"],
    }  # fmt: skip


def gsm8k(rng, i):
    number = rng.choice(["5", "1,200", "$7", "-3", "2.50", "12."])
    answer = f"{text(rng)} <<1+1=2>> {text(rng)}\n#### {number}"
    return {"question": text(rng, 3, 20), "answer": answer}


def math(rng, i):
    boxed = [
        "\\boxed{\\frac{1}{2}}", "\\boxed{\\frac{\\sqrt{3}}{2}}", "\\fbox{1} \\boxed{x=5}",
        "\\boxed{12\\%}", "$\\boxed 7$.", "\\boxed{1,\\!000\\text{ cm}}",
    ][i % 6]  # fmt: skip
    kind, solution = ["Algebra", "Geometry"][i % 2], f"{text(rng)} \\boxed{{0}} so {boxed}"
    return {"problem": text(rng, 3, 20), "level": "1", "type": kind, "solution": solution}


def wikitext(rng, i):
    def line():
        headings = [f" = {text(rng, 1, 3)} = \n", " = = = Deep = = = \n", "\n"]
        sentence = f" {text(rng)} , the 1 @,@ 000 @-@ year 3 @.@ 5 ' s ' dogs ' ( a {text(rng)} ) "
        sentence += f'[ 7 ] " {text(rng, 1, 4)} " : 20 ° N ; it \'s ! \n'
        return rng.choice([*headings, sentence, sentence])

    return {"page": "".join(line() for _ in range(rng.randint(1, 12)))}


def humaneval(rng, i):
    return {
        "task_id": f"HumanEval/{i}", "prompt": f'def f{i}(x):\n    """ {text(rng)} """\n',
        "test": f"def check(f):\n    assert f(1) == {i}\n", "entry_point": f"f{i}",
        "canonical_solution": f"    return {i}\n",
    }  # fmt: skip


def mbpp(rng, i):
    return {
        "task_id": i, "text": text(rng), "code": f"def g(x):\r\n    return {i}",
        "test_list": [f"assert g({k}) == {i}" for k in range(3)],
        "test_setup_code": "", "challenge_test_list": [],
    }  # fmt: skip


def write(folder: Path, files: dict[str, list[dict]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, docs in files.items():
        lines = "".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def export(model, folder: Path, tokenizer) -> Path:
    export_granite(model, folder, tokenizer.eot_token, data.tokenizer_files(tokenizer))
    return folder


def harness_task(name: str, files: dict[str, list[dict]], group: str = "") -> dict:
    """The harness's configuration of a task, with our items in place of the download."""
    import datasets
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    file, split, train_split = TASK_FILES[name].split()
    folder = Path(lm_eval.tasks.__file__).parent
    config = load_yaml(folder / f"{file.format(group.lower())}.yaml")
    examples = files.get("mmlu.dev" if name == "mmlu" else f"{name}.train", files[name])
    splits = {
        key: datasets.Dataset.from_list([d for d in docs if not group or group in d.values()])
        for key, docs in ((split, files[name]), (train_split, examples))
    }
    if name in WRITTEN:
        assert config["generation_kwargs"].get("max_gen_toks", 256) == WRITTEN[name]
        config["generation_kwargs"]["max_gen_toks"] = SHORT
    return config | {"custom_dataset": lambda **_: datasets.DatasetDict(splits)}


def harness_model(folder: Path, max_len: int, batch_size: int = 8):
    from lm_eval.models.huggingface import HFLM

    options = dict(device="cpu", dtype="float32", max_length=max_len, batch_size=batch_size)
    return HFLM(pretrained=str(folder), **options)


def run_harness(model, files: dict, names: list[tuple[str, str]], shots: int):
    """Evaluate as lm_eval.simple_evaluate does, without its survey of the machine.

    names: (task, group). -> its metrics, (task, group) -> dict, and its samples, -> list of dicts.
    """
    import lm_eval.evaluator
    from lm_eval.api.task import ConfigurableTask

    tasks = {}
    for name, group in names:
        key = f"{name} {group}"
        task = ConfigurableTask(config=harness_task(name, files, group) | {"task": key})
        task.set_config(key="num_fewshot", value=0 if name == "wikitext" else shots)
        task.set_fewshot_seed(seed=1234)
        tasks[key] = task
    everything = {"tasks": tasks, "groups": {}, "group_map": {}}
    output = lm_eval.evaluator.evaluate(
        model, everything, bootstrap_iters=2, confirm_run_unsafe_code=True
    )
    by_name = lambda part: {tuple(key.split(" ")): value for key, value in output[part].items()}
    return by_name("results"), by_name("samples")
