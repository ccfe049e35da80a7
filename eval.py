"""How good is a model? Held-out loss, a look at what it writes, and the tasks of the paper's tables.

The tasks' numbers are those of lm-evaluation-harness, which the paper used: the same texts, the
same rules, from local files. A model is a run's folder or a Granite folder, such as the released ones.

Read `validation_loss`; then `score`, which finds how likely a model thinks a text is, `complete`,
which lets it write, `TASKS`, what it is asked, and `measure`, what comes out.

    python eval.py --model runs/laptop-power-1                      loss on all held-out text
    python eval.py --model runs/laptop-power-1 --prompt "def "      lets it continue a text
    python eval.py --model DIR --tasks arc_easy,piqa --data FOLDER  FOLDER/arc_easy.jsonl, FOLDER/piqa.jsonl
    torchrun --nproc_per_node 8 eval.py --model DIR --tasks mmlu    several GPUs share the items
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import data
from model import GPT, GPTConfig, is_granite, load_model
from tools.devices import pick_device, rank_and_world, total

# ---------------------------------------------------------------------------------------------
# Held-out loss


@torch.no_grad()
def validation_loss(model: GPT, corpus: data.Corpus, max_tokens: int | None = None) -> dict[str, float]:
    """Mean cross-entropy on the held-out tokens, in whole sequences of the model's seq_len.

    Returns val_loss, in nats per token, and val_bpb, bits per byte: the nats of all targets over
    ln 2 times the bytes that these targets stand for (end-of-text stands for none). Bits per byte
    can be compared between tokenizers, nats per token cannot.
    max_tokens: evaluate about so many, the same sequences, spread over all documents, every time.
    Several processes share the work, and all get the result.
    """
    seq_len, device = model.cfg.seq_len, next(model.parameters()).device
    n = data.n_sequences(corpus.val, seq_len)
    use = n if max_tokens is None else min(n, max(1, max_tokens // seq_len))
    index = data.shuffled(np.arange(use), n, seed=0)
    lengths = data.bytes_per_token(corpus.tokenizer)
    nats, n_bytes, per_forward = 0.0, 0, max(1, 2**13 // seq_len)
    rank, world = rank_and_world()
    was_training = model.training
    model.eval()
    for part in np.array_split(index, math.ceil(use / per_forward))[rank::world]:
        inputs, targets = data.read_sequences(corpus.val, part, seq_len)
        loss, _ = model(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
        nats += loss.item() * targets.size
        n_bytes += int(lengths[targets].sum())
    model.train(was_training)
    nats, n_bytes = total(torch.tensor([nats, n_bytes], dtype=torch.float64)).tolist()
    return {"val_loss": nats / (use * seq_len), "val_bpb": nats / (math.log(2) * n_bytes)}


def check_corpus(cfg: GPTConfig, corpus: data.Corpus) -> None:
    """Raise ValueError where model and corpus do not fit together."""
    if corpus.meta["vocab_size"] > cfg.vocab_size:
        raise ValueError(
            f"--vocab_size {cfg.vocab_size}: the corpus {corpus.path} needs {corpus.meta['vocab_size']}, "
            f"train with --vocab_size {corpus.meta['vocab_size']}"
        )
    for split, ids in (("training", corpus.train), ("held-out", corpus.val)):
        if data.n_sequences(ids, cfg.seq_len) < 1:
            raise ValueError(f"--seq_len {cfg.seq_len}: the corpus {corpus.path} has only {len(ids):,} {split} tokens")


# ---------------------------------------------------------------------------------------------
# Sampling


def token_bytes(model: GPT, tokenizer: tiktoken.Encoding) -> list[bytes]:
    """The text of each id that the model may write; none for special tokens and for rows that its tokenizer does not use."""
    text = [b""] * model.cfg.vocab_size
    for i in np.flatnonzero(data.bytes_per_token(tokenizer)):
        text[i] = tokenizer.decode_single_token_bytes(i)
    return text


def sample(model: GPT, tokenizer: tiktoken.Encoding, prompt: str = "", max_new_tokens: int = 400, temperature: float = 0.8, top_k: int | None = 50) -> str:
    """The prompt and what the model writes behind it, up to the end of the document.

    An empty prompt starts a new document. torch.manual_seed makes it repeatable.
    """
    text = token_bytes(model, tokenizer)
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)]  # documents begin after end-of-text
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    new = model.generate(idx, max_new_tokens, temperature, top_k)[0, len(ids) :].tolist()
    if tokenizer.eot_token in new:
        new = new[: new.index(tokenizer.eot_token)]
    return prompt + b"".join(text[i] for i in new).decode(errors="replace")


# ---------------------------------------------------------------------------------------------
# Scoring: how likely a text is behind another

Request = tuple[list[int], int]  # token ids, and how many of the last of them are asked for


def encode_pair(tokenizer: tiktoken.Encoding, context: str, continuation: str, max_len: int) -> Request:
    """A continuation behind its context, in at most max_len + 1 tokens: the model reads all but the last.

    A word's space belongs to the word: the context's trailing white space goes to the continuation,
    and the two are cut into tokens as one text. Something has to stand first, if need be end-of-text.
    """
    before = tokenizer.encode_ordinary(context.rstrip())
    after = tokenizer.encode_ordinary(context + continuation)[len(before) :]
    ids = [*(before or [tokenizer.eot_token]), *after][-(max_len + 1) :]
    return ids, min(len(after), len(ids) - 1)


def rolling_windows(ids: list[int], eot: int, max_len: int) -> list[Request]:
    """A long text in windows that ask for each of its tokens once, every one behind as many others as fit."""
    ids, requests = [eot, *ids], []  # the text's first token is now number 1
    for begin in range(1, len(ids), max_len):
        end = min(begin + max_len, len(ids))
        requests.append((ids[max(0, end - max_len - 1) : end], end - begin))
    return requests


def pick(cache: list[dict], rows: list[int]) -> list[dict]:
    """The keys and values of these rows, a row as often as it is named."""
    return [{name: table[rows] for name, table in layer.items()} for layer in cache]


@torch.no_grad()
def score(model: GPT, items: list[list[Request]]) -> list[list[float]]:
    """For each request of each item: the sum, in nats, of the log-probabilities of the tokens that it asks for.

    An item's requests are its choices, and they begin alike. So a batch grows like a tree: what
    all items have in common (the examples before the question) is read once, then each item's
    context once, then the choices, padded on the right, which a causal model does not see.
    """
    on_device = lambda ids: torch.tensor(ids, device=model.embed.weight.device)
    asked = [(i, ids, n) for i, item in enumerate(items) for ids, n in item]
    # The last token is never read: an item's choices of one token share a row.
    rows = {row: r for r, row in enumerate(dict.fromkeys((i, tuple(ids[:-1])) for i, ids, _ in asked))}
    families = [[ids for _, ids in family] for _, family in itertools.groupby(rows, key=lambda row: row[0])]  # each item's
    # Before `cut`, the same place in the whole batch, an item's rows are alike and no logits are needed.
    alike = [len(os.path.commonprefix(family)) for family in families]  # despite its name, it takes sequences of anything
    cut = min(alike + [len(ids) - 1 - n for _, ids, n in asked])
    trunk = len(os.path.commonprefix([family[0][:cut] for family in families]))
    trunk = trunk if trunk >= 32 and len(items) > 1 else 0  # less is not worth a pass of its own
    if len(rows) == len(items):  # nothing to share but the trunk
        cut = trunk
    cache: list[dict] = [{} for _ in model.blocks]
    if trunk:
        model.hidden(on_device([families[0][0][:trunk]]), cache)
        cache = pick(cache, [0] * len(items))
    if cut > trunk:
        model.hidden(on_device([family[0][trunk:cut] for family in families]), cache)
    T = max(len(ids) for _, ids in rows) - cut
    padded = [[*ids[cut:], *[0] * (T + cut - len(ids))] for _, ids in rows]
    x, _ = model.hidden(on_device(padded), pick(cache, [i for i, _ in rows]))  # [rows, T, C]

    where, targets = [], []  # the position that predicts a token, and the token
    for i, ids, n in asked:
        last = rows[i, tuple(ids[:-1])] * T + len(ids) - 1 - cut
        where += range(last - n, last)
        targets += ids[len(ids) - n :]
    x, targets, log_p = x.flatten(0, 1)[where], on_device(targets), []
    for part, wanted in zip(x.split(1024), targets.split(1024)):  # the logits of a whole batch may not fit
        log_p.append(-F.cross_entropy(model.logits(part).float(), wanted, reduction="none").cpu().double())
    sums = iter(torch.cat(log_p).split([n for _, _, n in asked]))
    return [[next(sums).sum().item() for _ in item] for item in items]


def batches(sizes: list[tuple[str, int, int, int]], batch_tokens: int, title: str):
    """Yields lists of item numbers, group by group and the longest first, so that those in a batch are of about one length.

    sizes: of each item its group, the length of its context, of its longest row, and the number of its rows.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i][0], -sizes[i][1], -sizes[i][2]))
    with tqdm(total=len(order), desc=title, unit=" items", leave=False, disable=None) as progress:
        while order:
            n, rows, longest = 0, 0, 0
            for group, _, length, more in (sizes[i] for i in order):
                rows, longest = rows + more, max(longest, length)
                if n and (rows * longest > batch_tokens or group != sizes[order[0]][0]):
                    break
                n += 1
            yield order[:n]
            order = order[n:]
            progress.update(n)


def log_likelihoods(model: GPT, items: list[list[Request]], batch_tokens: int = 8192, groups: list[str] | None = None, title: str = "") -> list[list[float]]:
    """`score` for any number of items -> a list for each. Items of one group are likely to begin alike."""
    sizes = []
    for item, group in zip(items, groups or [""] * len(items)):
        sizes.append((group, min(len(ids) - n for ids, n in item), max(len(ids) for ids, _ in item), len(item)))
    result: list[list[float]] = [[] for _ in items]
    for batch in batches(sizes, batch_tokens, title):
        for i, sums in zip(batch, score(model, [items[i] for i in batch])):
            result[i] = sums
    return result


# ---------------------------------------------------------------------------------------------
# Writing: the likeliest continuation


@torch.no_grad()
def complete(model: GPT, prompts: list[list[int]], max_new_tokens: int, finished: Callable[[list[int]], bool]) -> list[list[int]]:
    """The likeliest next tokens behind each prompt, until finished(new tokens) or there are max_new_tokens.

    Prompts may differ in length: all are read up to the end of the shortest, from there on token
    by token, where a longer one goes on with its own tokens first.
    """
    position = min(map(len, prompts))
    tokens, active = [ids[:position] for ids in prompts], list(range(len(prompts)))
    cache: list[dict] = [{} for _ in model.blocks]
    new: list[list[int]] = [[] for _ in prompts]
    while active:
        x, _ = model.hidden(torch.tensor(tokens, device=model.embed.weight.device), cache)
        going, tokens = [], []  # the rows that go on, and each one's next token
        for row, token in enumerate(model.logits(x[:, -1]).argmax(-1).tolist()):
            i = active[row]
            if position < len(prompts[i]):
                token = prompts[i][position]
            else:
                new[i].append(token)
                if len(new[i]) == max_new_tokens or finished(new[i]):
                    continue
            going.append(row)
            tokens.append([token])
        if len(going) < len(active):
            cache, active = pick(cache, going), [active[row] for row in going]
        position += 1
    return new


def write(model: GPT, tokenizer: tiktoken.Encoding, prompts: list[str], stops, max_new_tokens: int, max_len: int,
          batch_tokens: int = 8192, title: str = "") -> list[str]:  # fmt: skip
    """What the model writes behind each prompt, up to a stop. Of a prompt that is too long, the end is kept."""
    text_of = token_bytes(model, tokenizer)
    reach = max(len(stop.encode()) for stop in stops)  # a stop that ends in the newest token began at most so many before

    def finished(new: list[int]) -> bool:
        tail = b"".join(text_of[i] for i in new[-reach:])
        return new[-1] == tokenizer.eot_token or any(stop.encode() in tail for stop in stops)

    encoded = [(tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token])[max_new_tokens - max_len :] for prompt in prompts]
    answers = [""] * len(prompts)
    for batch in batches([("", len(ids), len(ids) + max_new_tokens, 1) for ids in encoded], batch_tokens, title):
        for i, new in zip(batch, complete(model, [encoded[i] for i in batch], max_new_tokens, finished)):
            text = b"".join(text_of[token] for token in new).decode(errors="replace")
            answers[i] = min((text.split(stop)[0] for stop in stops), key=len)
    return answers


# ---------------------------------------------------------------------------------------------
# What is an answer worth that the model wrote itself?


def grade_gsm8k(doc: dict, output: str) -> dict[str, bool]:
    """exact_match wants the answer behind ####, as in the examples; the flexible one takes the last number of all."""

    def bare(text: str) -> str:
        for pattern in (",", r"\$", "(?s).*#### ", r"\.$"):
            text = re.sub(pattern, "", text)
        return text.lower()

    strict = re.search(r"#### (\-?[0-9\.\,]+)", output)
    numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", output)
    gold, nothing = bare(doc["answer"]), "[invalid]"
    return {
        "exact_match": bare(strict[1].strip() if strict else nothing) == gold,
        "exact_match_flexible": bare(numbers[-1] if numbers else nothing) == gold,
    }


def grade_math(doc: dict, output: str) -> dict[str, bool]:
    inside = output.split("$", 1)[1].rsplit("$", 1)[0] if output.count("$") > 1 else output
    gold = boxed(doc["solution"])
    try:
        return {"exact_match": plain_latex(inside) == plain_latex(gold)}
    except (ValueError, IndexError):  # not LaTeX that the rules know
        return {"exact_match": inside == gold}


def boxed(solution: str) -> str:
    """What stands in the last \\boxed{...}, or behind the last "\\boxed ". Raises ValueError where there is none."""
    if "\\boxed " in solution:
        return solution.split("\\boxed ")[-1].split("$")[0]
    before, found, inside = solution.rpartition("\\boxed{")
    depth = 1
    for i, letter in enumerate(inside if found else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return inside[:i]
    raise ValueError("its solution has no \\boxed answer")


def plain_latex(text: str) -> str:
    """Spellings that mean the same made equal, by the rules of the MATH paper, of which each has its holes.

    Raises ValueError or IndexError where a rule does not apply.
    """
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
                     ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")):  # fmt: skip
        text = text.replace(old, new)
    if "\\text{ " in text:  # a unit
        text, _unit = text.split("\\text{ ")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    left, *right = text.split("=")
    if len(right) == 1 and len(left) <= 2:  # "x = 3"
        text = right[0]
    first, *roots = text.split("\\sqrt")
    text = first + "".join("\\sqrt" + (r if r[0] == "{" else f"{{{r[0]}}}{r[1:]}") for r in roots)
    text = plain_fractions(text.replace(" ", ""))
    text = "\\frac{1}{2}" if text == "0.5" else text
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
            part = f"{{{part[0]}}}" + (part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}")
        result += "\\frac" + part
    return result


# ---------------------------------------------------------------------------------------------
# Running the code that a model wrote

RUN_SECONDS, RUN_PROCESSES = 5.0, 16
RUN_LIMITS = "ulimit -v 1048576; ulimit -f 32768; ulimit -t 5; ulimit -c 0"  # of a process: 1 GiB of memory, 16 MiB a file, 5 s, no core


@functools.cache
def isolation() -> tuple[str, ...]:
    """Where Linux allows it: a command before the command that takes network, other processes and their secrets out of sight."""
    command = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    with contextlib.suppress(OSError):
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return ()


def group_size(group: int) -> int:
    """How many processes of this group live (on Linux)."""
    size = 0
    for process in Path("/proc").glob("[0-9]*"):  # not "[0-9]*/stat": glob itself would look at one that ended just now, and raise
        with contextlib.suppress(OSError):  # it ended just now
            # bytes: a process may call itself what it likes, ")" and broken characters included
            state, _parent, its_group = (process / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            size += int(its_group) == group and state not in b"ZX"  # not a dead one that nobody has buried
    return size


def passes(program: str) -> bool:
    """Run a program that a model wrote, its tests at its end: does it get there in time?

    It has its own process group, limits, no environment, a folder that is deleted afterwards, and
    no network where the system can do that. That stops accidents. It is no security boundary: it
    may write where you may, and without `isolation` leave its group.
    """
    arrived = 100 + secrets.randbelow(100)  # an exit status that no program ends with by accident
    folder = tempfile.mkdtemp()
    Path(folder, "program.py").write_text(f"{program}\nraise SystemExit({arrived})\n", encoding="utf-8", errors="replace")
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'{RUN_LIMITS}; exec env -i "$@"', "sh", *isolation(), sys.executable, "-I", "program.py"], cwd=folder, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + RUN_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline and group_size(process.pid) <= RUN_PROCESSES:
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the group, not the process: its children, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while group_size(process.pid) and time.monotonic() < deadline + 60:  # those of a fork bomb take a while to go,
            time.sleep(0.02)  # and until then there may be no room for the next program
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)  # shutil.rmtree gives up 1,000 folders deep
    return process.returncode == arrived


# ---------------------------------------------------------------------------------------------
# The tasks


class Question(NamedTuple):
    contexts: list[str]  # before each choice
    choices: list[str]  # to be scored; where the model writes itself: the answer, alone
    gold: int = 0  # number of the right choice
    doc: dict = {}  # the item that it was made of
    group: str = ""


class Task(NamedTuple):
    source: str  # public data set, its configuration, the split to evaluate on, the split of the examples
    metric: str  # the one in the paper's tables
    ask: Callable[[dict], Question]  # from an item in the data set's own fields
    shots: int = 0  # examples before each question, in the paper
    draw: str = "any"  # examples: "first", "any", or "others", not the item itself (the harness's choice, task by task)
    group: str = ""  # field that divides the items; each group has its own examples
    stops: tuple[str, ...] = ()  # where the model writes itself: what ends its answer
    max_new_tokens: int = 256
    grade: Callable[[dict, str], dict[str, bool]] | None = None  # item and answer -> metrics
    program: Callable[[dict, str], str] | None = None  # or the program to be run, with its tests


def behind(context: str, choices: list[str], gold: int = 0) -> Question:
    return Question([context] * len(choices), choices, int(gold))


def arc(doc: dict) -> Question:
    return behind(f"Question: {doc['question']}\nAnswer:", doc["choices"]["text"], doc["choices"]["label"].index(doc["answerKey"]))


def hellaswag(doc: dict) -> Question:
    def clean(text: str) -> str:  # the brackets are left over from WikiHow's headings
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"
    return behind(clean(context), [clean(ending) for ending in doc["endings"]], doc["label"])


def winogrande(doc: dict) -> Question:
    """The other way round: two contexts, one continuation."""
    before, after = doc["sentence"].split("_", 1)
    return Question([before + doc["option1"], before + doc["option2"]], [after.strip()] * 2, ["1", "2"].index(doc["answer"]))


def mmlu(doc: dict) -> Question:
    a, b, c, d = doc["choices"]
    return behind(f"{doc['question'].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:", list("ABCD"), doc["answer"])


def detokenize(page: str) -> str:
    """Wikitext's separated tokens as a writer would have written them, by the harness's rules, in its order."""
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


def mbpp(doc: dict) -> Question:
    one, two, three = doc["test_list"][:3]
    ask = f"You are an expert Python programmer, and here is your task: {doc['text']} Your code should pass these tests:"
    return behind(f"{ask}\n\n{one}\n{two}\n{three}\n[BEGIN]\n", [f"{doc['code']}\n[DONE]"])


TASKS = {
    "wikitext": Task("EleutherAI/wikitext_document_level wikitext-2-raw-v1 test -", "word_perplexity", lambda doc: behind("", [detokenize(doc["page"])])),
    "arc_easy": Task("allenai/ai2_arc ARC-Easy test train", "acc_norm", arc),
    "arc_challenge": Task("allenai/ai2_arc ARC-Challenge test train", "acc_norm", arc),
    "boolq": Task("aps/super_glue boolq validation train", "acc", draw="others",
        ask=lambda doc: behind(f"{doc['passage']}\nQuestion: {doc['question']}?\nAnswer:", ["no", "yes"], doc["label"])),
    "hellaswag": Task("Rowan/hellaswag default validation train", "acc_norm", hellaswag, draw="others"),
    "openbookqa": Task("allenai/openbookqa main test train", "acc_norm",
        ask=lambda doc: behind(doc["question_stem"], doc["choices"]["text"], doc["choices"]["label"].index(doc["answerKey"].lstrip()))),
    "piqa": Task("baber/piqa default validation train", "acc_norm", draw="others",
        ask=lambda doc: behind(f"Question: {doc['goal']}\nAnswer:", [doc["sol1"], doc["sol2"]], doc["label"])),
    "winogrande": Task("allenai/winogrande winogrande_xl validation train", "acc", winogrande, draw="others"),
    "mmlu": Task("cais/mmlu all test dev", "acc", mmlu, shots=5, draw="first", group="subject"),
    "gsm8k": Task("openai/gsm8k main test train", "exact_match", shots=5, stops=("Question:", "</s>", "<|im_end|>"), grade=grade_gsm8k,
        ask=lambda doc: behind(f"Question: {doc['question']}\nAnswer:", [doc["answer"]])),
    "math": Task("EleutherAI/hendrycks_math * test train", "exact_match", shots=5, group="type", stops=("Problem:",), grade=grade_math,
        ask=lambda doc: behind(f"Problem: {doc['problem']}\nAnswer:", [boxed(doc["solution"])])),
    "humaneval": Task("openai/openai_humaneval openai_humaneval test -", "pass@1", max_new_tokens=1024,
        stops=("\nclass", "\ndef", "\n#", "\nif", "\nprint"), ask=lambda doc: behind(doc["prompt"], [""]),
        program=lambda doc, text: f"{doc['prompt']}{text}\n{doc['test']}\ncheck({doc['entry_point']})"),
    "mbpp": Task("google-research-datasets/mbpp full test prompt[1:]", "pass@1", mbpp, draw="first", stops=("[DONE]",),  # the harness begins at the second
        program=lambda doc, text: "\n".join([text, *doc["test_list"]])),
}  # fmt: skip


def read_items(name: str, folder: Path | None, examples: bool) -> list[tuple[str, dict]]:
    """(where it stands, item) of FOLDER/TASK.jsonl, or of TASK.train.jsonl (mmlu.dev.jsonl) with the examples; without a folder, of the public data set.

    Raises FileNotFoundError or ValueError, naming file and line.
    """
    file, items = f"{name}{'' if not examples else '.dev' if name == 'mmlu' else '.train'}.jsonl", []
    if folder is None:
        return [(f"{file}, item {i}", doc) for i, doc in enumerate(download(name, examples, file), 1)]
    if not (folder / file).is_file():
        raise FileNotFoundError(f"{folder / file}: no such file, {'the examples for' if examples else 'the items of'} {name} should be there")
    for number, line in enumerate((folder / file).read_bytes().splitlines(), 1):
        where = f"{folder / file}, line {number}"
        try:
            if line.strip():
                items.append((where, json.loads(line)))
        except ValueError as error:  # also where it is not UTF-8
            raise ValueError(f"{where}: not JSON ({error})") from None
    if not items:
        raise ValueError(f"{folder / file}: is empty")
    return items


def download(name: str, examples: bool, file: str) -> list[dict]:
    repo, config, *splits = TASKS[name].source.split()
    try:
        import datasets

        configs = datasets.get_dataset_config_names(repo) if config == "*" else [config]
        return [doc for config in configs for doc in datasets.load_dataset(repo, config, split=splits[examples])]
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"--data: name the folder that has {file}; to download {repo} takes `pip install datasets` and a network ({error!r})") from None


def read_questions(name: str, folder: Path | None, examples: bool = False, limit: int | None = None) -> list[Question]:
    """Raises ValueError for an item, with its line, that does not have the fields of its public data set."""
    task, questions = TASKS[name], []
    for where, doc in read_items(name, folder, examples)[:limit]:
        try:
            question = task.ask(doc)._replace(doc=doc, group=doc[task.group] if task.group else "")
            texts = [*question.contexts, *question.choices, question.group]
            if task.program:  # what it needs at the end, after hours of writing
                texts += [str(doc["task_id"]), task.program(doc, "")]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a field that should be a text is none")
            if not 0 <= question.gold < len(question.choices):
                raise IndexError(f"there is no answer number {question.gold}")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(f"{where}: not an item of {name} ({f'lacks {error}' if isinstance(error, KeyError) else error})") from None
        questions.append(question)
    return questions


def questions_of(name: str, folder: Path | None, shots: int, limit: int | None = None) -> list[Question]:
    """The questions of a task, each behind its examples, drawn as the harness draws them."""
    task, questions = TASKS[name], read_questions(name, folder, limit=limit)
    intro = "The following are multiple choice questions (with answers) about {}.\n\n" if name == "mmlu" else ""
    space = "" if name == "mbpp" else " "
    pools, generators = defaultdict(list), defaultdict(lambda: random.Random(1234))
    for example in read_questions(name, folder, examples=True) if shots else ():
        pools[example.group].append(example)
    for i, question in enumerate(questions):
        group, pool = question.group, pools[question.group]
        n = shots + 1 if shots and task.draw == "others" else shots  # one in reserve, should it draw the item itself
        if len(pool) < n:
            raise ValueError(f"--num_fewshot {shots}: {name} needs {n} examples{f' for {group}' * bool(group)}, there are {len(pool)}")
        drawn = pool[:n] if task.draw == "first" else generators[group].sample(pool, n)
        if n > shots:
            drawn = [example for example in drawn if example.doc != question.doc][:shots]
            if len(drawn) < shots:  # it was drawn twice
                drawn = generators[group].sample([example for example in pool if example.doc != question.doc], shots)
        before = intro.format(group.replace("_", " "))
        before += "".join(f"{example.contexts[example.gold]}{space}{example.choices[example.gold]}\n\n" for example in drawn)
        questions[i] = question._replace(contexts=[before + context for context in question.contexts])
    return questions


# ---------------------------------------------------------------------------------------------
# From items to numbers


def answer(name: str, questions: list[Question], model: GPT, tokenizer: tiktoken.Encoding, max_len: int, batch_tokens: int = 8192) -> list:
    """What the model says to each question: the log-likelihoods of its choices or, of a page, of all of it; or a text."""
    task = TASKS[name]
    if task.stops:
        return write(model, tokenizer, [q.contexts[0] for q in questions], task.stops, task.max_new_tokens, max_len, batch_tokens, name)
    if task.metric == "word_perplexity":
        pages = [rolling_windows(tokenizer.encode_ordinary(q.choices[0]), tokenizer.eot_token, max_len) for q in questions]
        windows = [[request] for page in pages for request in page]  # windows begin differently: each is an item of its own
        sums = iter(log_likelihoods(model, windows, batch_tokens, title=name))
        return [math.fsum(next(sums)[0] for _ in page) for page in pages]
    items = [[encode_pair(tokenizer, context, f" {choice}", max_len) for context, choice in zip(q.contexts, q.choices)] for q in questions]
    return log_likelihoods(model, items, batch_tokens, [q.group for q in questions], name)


def measure(name: str, questions: list[Question], answers: list) -> dict:
    """Metrics and standard errors of a task, and the rule behind them. answers: as `answer` gives them; of programs, whether they pass."""
    task = TASKS[name]
    if task.metric == "word_perplexity":  # words and bytes are those of the page before it was detokenized
        nats, pages = -math.fsum(answers), [q.doc["page"] for q in questions]
        per_word = nats / sum(len(re.split(r"\s+", page)) for page in pages)
        per_byte = nats / sum(len(page.encode()) for page in pages)
        result = {"word_perplexity": math.exp(per_word), "byte_perplexity": math.exp(per_byte), "bits_per_byte": per_byte / math.log(2)}
        return result | {f"{metric}_stderr": None for metric in result} | {"rule": "windows that score each token once, as many before it as fit"}
    if task.grade:
        values, rule = [task.grade(q.doc, text) for q, text in zip(questions, answers)], "greedy, up to a stop; exact match"
    elif task.program:
        values, rule = [{"pass@1": passed} for passed in answers], "greedy, up to a stop; one sample for each problem"
    else:
        values, rule = [], "the likeliest choice" + "; acc_norm: per character (not token, not byte)" * (task.metric == "acc_norm")
        for q, sums in zip(questions, answers):
            values.append({"acc": int(np.argmax(sums)) == q.gold})  # the first one on a tie
            if task.metric == "acc_norm":
                values[-1]["acc_norm"] = int(np.argmax([s / max(1, len(c)) for s, c in zip(sums, q.choices)])) == q.gold
    result = {"rule": rule}
    for metric in values[0] if values else ():
        result[metric], result[f"{metric}_stderr"] = mean_and_stderr([value[metric] for value in values], [q.group for q in questions])
    return result


def mean_and_stderr(values: list, groups: list[str]) -> tuple[float, float | None]:
    """The mean, and its standard error by the spread of the values around the mean of their own group."""
    members = defaultdict(list)
    for value, group in zip(values, groups):
        members[group].append(float(value))
    squares = sum(((np.array(some) - np.mean(some)) ** 2).sum() for some in members.values())
    freedom = len(values) - len(members)
    return float(np.mean(values)), math.sqrt(squares / freedom / len(values)) if freedom else None


AVERAGED = ("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")


def paper_average(results: dict[str, dict]) -> float | None:
    """The Average of the paper's Tables 5 and 6: six columns of equal weight, of which ARC is the mean of its two tasks."""
    if not set(AVERAGED) <= set(results):
        return None
    easy, challenge, *others = [results[name][TASKS[name].metric] for name in AVERAGED]
    return ((easy + challenge) / 2 + sum(others)) / 6


def gather(mine: list) -> list:
    """Every process's results in the order of all items, of which process r has every n-th from the r-th on."""
    _, world = rank_and_world()
    if world == 1:
        return mine
    parts: list = [None] * world
    dist.all_gather_object(parts, mine)
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def print_rows(name: str, result: dict) -> None:
    for metric in [key.removesuffix("_stderr") for key in result if key.endswith("_stderr")]:
        star, stderr = "*" if metric == TASKS[name].metric else " ", result[f"{metric}_stderr"]
        print(f"{name:<14}{result['n']:>6}{result['num_fewshot']:>6}{result['max_len']:>7}  {star}{metric:<21}{result[metric]:>9.4f}"
              f"{'' if stderr is None else format(stderr, '.4f'):>9}  {result['rule']}")  # fmt: skip
    if "samples" in result:
        print(f"{name}: the model's code is in {result['samples']}{'' if 'pass@1' in result else ', not run'}")


def evaluate(work: dict[str, tuple[list[Question], int]], model: GPT, tokenizer: tiktoken.Encoding, args: argparse.Namespace) -> None:
    """work: task -> (its questions, shots). Prints a table and writes args.out and the code that the model wrote, task after task."""
    rank, world = rank_and_world()
    say = print if rank == 0 else lambda *_: None
    say(f"{'task':<14}{'n':>6}{'shots':>6}{'window':>7}   {'metric':<21}{'value':>9}{'stderr':>9}  rule (*: the paper's metric)")
    results: dict[str, dict] = {}
    for name, (questions, shots) in work.items():
        task = TASKS[name]
        facts = {"n": len(questions), "num_fewshot": shots, "max_len": args.max_len, "dtype": str(model.embed.weight.dtype).removeprefix("torch.")}
        answers = gather(answer(name, questions[rank::world], model, tokenizer, args.max_len, args.batch_tokens))
        if task.program:
            file = args.out.parent / name / "samples.jsonl"  # what the official scorers of both read
            lines = [json.dumps({"task_id": q.doc["task_id"], "completion": text}) + "\n" for q, text in zip(questions, answers)]
            if rank == 0:
                file.parent.mkdir(exist_ok=True)
                file.write_text("".join(lines))
            programs = [task.program(q.doc, text) for q, text in zip(questions, answers)] if args.allow_code_execution else []
            answers = gather([passes(program) for program in tqdm(programs[rank::world], f"{name}, running", leave=False, disable=None)])
            facts["samples"] = str(file)
        results[name] = measure(name, questions, answers) | facts | {"paper_metric": task.metric}
        average = paper_average(results)
        if rank > 0:
            continue
        print_rows(name, results[name])
        if args.out:  # after every task: a later one may fail
            extra = {} if average is None else {"paper_average": {"average": average, "average_stderr": None, "n": 6}}
            args.out.with_suffix(".tmp").write_text(json.dumps(results | extra, indent=1) + "\n")
            os.replace(args.out.with_suffix(".tmp"), args.out)
    if average is not None:
        say(f"the paper's Average: {average:.4f}, six columns of equal weight, ARC the mean of easy and challenge")


# ---------------------------------------------------------------------------------------------


def trained_on(model: Path) -> data.Corpus | data.Mixture:
    """The corpus or mixture of the run that this folder, or checkpoint in a run's folder, belongs to."""
    run = model if model.is_dir() else data.run_of(model)
    try:
        config = json.loads((run / "config.json").read_text())
    except OSError:
        raise FileNotFoundError(f"{model}: not in the folder of a run, name its corpus with --data") from None
    if is_granite(run):
        raise ValueError(f"{model}: released weights, they do not say which text they were trained on, name a corpus with --data")
    return data.load_corpus(config["data"], config["tokenizer"])


def check_tokenizer(model: Path, tokenizer: tiktoken.Encoding) -> None:
    """Raise ValueError if a corpus with this tokenizer means nothing to the model."""
    try:
        own = data.tokenizer_of(model)
    except (OSError, ValueError):
        return  # it does not say which one is its own
    text = Path(__file__).read_text(encoding="utf-8")  # any text that is long enough
    if own.encode_ordinary(text) != tokenizer.encode_ordinary(text):
        raise ValueError(f"--data: that corpus has the tokenizer {tokenizer.name}, {model} was trained with {own.name}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="eval.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", type=Path, required=True, help="folder of a run, a checkpoint, or a Granite folder")
    parser.add_argument("--data", help="corpus to evaluate on (default: the one that the run was trained on); with --tasks, folder of their "
                        "TASK.jsonl, fields as in the public data set (default: download it, if `datasets` is installed)")  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto: cuda, else mps, else cpu")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of the weights (default: as they are saved)")
    group = parser.add_argument_group("tasks")
    group.add_argument("--tasks", help=f"comma-separated: {', '.join(TASKS)}")
    group.add_argument("--limit", type=int, help="only the first so many items of each")
    group.add_argument("--num_fewshot", type=int, help="examples before each question, from TASK.train.jsonl or mmlu.dev.jsonl (default: as in the paper)")
    group.add_argument("--max_len", type=int, help="tokens that the model sees at once (default: its seq_len)")
    group.add_argument("--batch_tokens", type=int, default=8192, help="tokens in a forward pass, what fits in memory (default: 8192)")
    group.add_argument("--out", type=Path, help="file for the results, as JSON")
    group.add_argument("--allow_code_execution", action="store_true", help="run what the model writes for humaneval and mbpp. It runs with limits that "
                       "stop accidents, which is no security boundary: do this in a container that has nothing to lose")  # fmt: skip
    group = parser.add_argument_group("sampling")
    group.add_argument("--prompt", help="continue this text instead of evaluating")
    group.add_argument("--max_new_tokens", type=int, default=400, help="length of the sample (default: 400)")
    group.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    group.add_argument("--top_k", type=int, default=50, help="sample among so many likeliest tokens (default: 50)")
    group.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    args = parser.parse_args(argv)
    limits = {"max_new_tokens": 0, "top_k": 1, "temperature": 0, "seed": 0, "limit": 1, "num_fewshot": 0, "max_len": 1, "batch_tokens": 1}
    for name, least in limits.items():
        value, most = getattr(args, name), {"temperature": 1000, "seed": 2**63 - 1}.get(name, 10**9)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name} {value}: must be between {least} and {most}")
    if 0 < args.temperature < 0.01:
        raise ValueError(f"--temperature {args.temperature}: must be 0 or at least 0.01")
    for name in args.tasks.split(",") if args.tasks is not None else ():
        if name not in TASKS:
            raise ValueError(f"--tasks {name}: not one of {', '.join(TASKS)}")
        if TASKS[name].program and not args.out:
            raise ValueError(f"--tasks {name}: needs --out, a file in the folder that the model's code goes to, as in --out results/scores.json")
    if args.out and (args.out.is_dir() or not args.out.parent.is_dir()):
        raise ValueError(f"--out {args.out}: {'is a folder' if args.out.is_dir() else 'its folder does not exist'}")
    return args


def prepare_tasks(args: argparse.Namespace, cfg: GPTConfig) -> dict[str, tuple[list[Question], int]]:
    """Task -> (its questions, shots). Raises ValueError or OSError before anything is scored."""
    work, args.max_len = {}, args.max_len or cfg.seq_len
    if args.max_len > cfg.seq_len:
        raise ValueError(f"--max_len {args.max_len}: the model's seq_len is {cfg.seq_len}")
    for name in args.tasks.split(","):
        task = TASKS[name]
        if task.stops and task.max_new_tokens >= args.max_len:
            raise ValueError(f"--tasks {name}: writes {task.max_new_tokens} tokens, which leaves no room for a prompt in a window of {args.max_len}")
        fixed = task.source.endswith(" -")  # there are no examples for it
        shots = task.shots if args.num_fewshot is None or fixed else args.num_fewshot
        work[name] = questions_of(name, Path(args.data) if args.data else None, shots, args.limit), shots
    return work


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        device = pick_device(args.device)
        if args.tasks and "LOCAL_RANK" in os.environ:  # started by torchrun
            dist.init_process_group("gloo")  # what the processes exchange is small
            device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}") if device == "cuda" else device
        model = load_model(args.model, device, None if args.dtype == "auto" else getattr(torch, args.dtype))
        if args.tasks or args.prompt is not None:
            tokenizer = data.tokenizer_of(args.model)
            if tokenizer.n_vocab > model.cfg.vocab_size:
                raise ValueError(f"{args.model}: its tokenizer has {tokenizer.n_vocab} tokens, its embedding only {model.cfg.vocab_size} rows")
            work = prepare_tasks(args, model.cfg) if args.tasks else {}
        else:
            corpus = data.load_corpus(args.data) if args.data else trained_on(args.model)
            for source in corpus.sources.values():
                check_corpus(model.cfg, source)
            if args.data:
                check_tokenizer(args.model, corpus.tokenizer)
    except (ValueError, OSError) as mistake:
        print(f"eval.py: {mistake}", file=sys.stderr)
        return 2
    if args.tasks:
        try:
            evaluate(work, model, tokenizer, args)
        except OSError as error:  # a full disk
            print(f"eval.py: {error}", file=sys.stderr)
            return 2
        if dist.is_initialized():
            dist.destroy_process_group()
    elif args.prompt is not None:
        torch.manual_seed(args.seed)
        print(sample(model, tokenizer, args.prompt, args.max_new_tokens, args.temperature, args.top_k))
    else:
        for source in corpus.sources.values():
            result = validation_loss(model, source)
            print(f"{args.model} on {source.path}: {result['val_loss']:.4f} nats per token, {result['val_bpb']:.4f} bits per byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
