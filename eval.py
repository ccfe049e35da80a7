"""How good is a model? Its validation loss, a sample of its writing, and the paper's benchmarks.

The benchmark numbers are those of lm-evaluation-harness, by the rules in tools/tasks.py. A model
is a run folder, a checkpoint, or a folder of released weights. Read `validation_loss`, then
`score` (how likely is a text?) and `complete` (the most likely text).

    python eval.py --model runs/laptop-power-1                 loss on the whole validation split
    python eval.py --model runs/laptop-power-1 --prompt "def " continues a text
    python eval.py --model DIR --tasks arc_easy,piqa --data FOLDER    FOLDER/arc_easy.jsonl, ...
    torchrun --nproc_per_node 8 eval.py --model DIR --tasks mmlu      8 GPUs share the items
"""

import argparse
import json
import math
import sys
from os.path import commonprefix  # of sequences of anything, not only of paths
from pathlib import Path

import tools.threads  # noqa: F401  before torch

import numpy as np
import torch
import torch.nn.functional as F

import data
from model import GPT, GPTConfig, load_model
from tools import tasks
from tools.config import fail, program_parser, whole_number
from tools.devices import join, pick_device, rank_and_world, share, total
from tools.runs import write_json

# -- Validation loss ------------------------------------------------------------------------------


@torch.no_grad()
def validation_loss(model: GPT, corpus: data.Corpus, max_tokens: int | None = None) -> dict:
    """Mean cross-entropy on the validation split, in whole sequences of the model's seq_len.

    Returns val_loss, in nats per token, and val_bpb, in bits per byte: nats / ln 2 over the bytes
    of the targets (end-of-text has none). Only bits per byte compare between tokenizers.
    max_tokens: evaluate about this many, always the same sequences, spread over all documents.
    Several processes share the work, and each returns the same result.
    """
    seq_len, device = model.cfg.seq_len, next(model.parameters()).device
    n = data.n_sequences(corpus.val, seq_len)
    used = n if max_tokens is None else min(n, max(1, max_tokens // seq_len))
    index = data.shuffled(np.arange(used), n, seed=0)
    lengths = data.bytes_per_token(corpus.tokenizer)
    nats, n_bytes, per_forward = 0.0, 0, max(1, 2**13 // seq_len)
    rank, world = rank_and_world()
    was_training = model.training
    model.eval()
    for part in np.array_split(index, math.ceil(used / per_forward))[rank::world]:
        inputs, targets = data.read_sequences(corpus.val, part, seq_len)  # both [B, T]
        loss, _ = model(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
        nats += loss.item() * targets.size
        n_bytes += int(lengths[targets].sum())
    model.train(was_training)
    nats, n_bytes = total(torch.tensor([nats, n_bytes], dtype=torch.float64)).tolist()
    return {"val_loss": nats / (used * seq_len), "val_bpb": nats / (math.log(2) * n_bytes)}


def check_corpus(cfg: GPTConfig, corpus: data.Corpus) -> None:
    """Raise ValueError if the model cannot read this corpus."""
    needed = corpus.meta["vocab_size"]
    if needed > cfg.vocab_size:
        raise ValueError(f"--vocab_size {cfg.vocab_size}: the corpus {corpus.path} needs {needed}; "
                         f"train with --vocab_size {needed}")  # fmt: skip
    for split, ids in (("training", corpus.train), ("validation", corpus.val)):
        if data.n_sequences(ids, cfg.seq_len) < 1:
            raise ValueError(f"--seq_len {cfg.seq_len}: the corpus {corpus.path} has only "
                             f"{len(ids):,} {split} tokens; choose a shorter one")  # fmt: skip


# -- How likely is a text? ------------------------------------------------------------------------


def pick(cache: list[dict], rows: list[int]) -> list[dict]:
    """The keys and values of these rows of the batch; a row may be repeated."""
    return [{name: table[rows] for name, table in layer.items()} for layer in cache]


def read(model: GPT, cache: list[dict], rows: list[list[int]]) -> torch.Tensor | None:
    """Run rows of tokens after the cached ones -> the last block's output, [B, T, C]."""
    if T := max(map(len, rows)):  # a causal model never sees the padding on the right
        padded = [[*row, *[0] * (T - len(row))] for row in rows]
        return model.hidden(torch.tensor(padded, device=model.embed.weight.device), cache)[0]


@torch.no_grad()
def score(model: GPT, items: list[list[tasks.Request]]) -> list[list[float]]:
    """Sum the log-probabilities (in nats) of the requested tokens, for each request of each item.

    The requests of an item are its answer choices, which share a context. We exploit this by
    running the batch as a tree: the few-shot examples common to all items run once, then each
    item's context once, then the choices.
    """
    asked = [(i, tuple(ids), n) for i, item in enumerate(items) for ids, n in item]
    # The last token is never read, so an item's one-token choices (A, B, C, D) share a row.
    rows = list(dict.fromkeys((i, ids[:-1]) for i, ids, _ in asked))
    contexts = [commonprefix([ids[: len(ids) - 1 - n] for ids, n in item]) for item in items]
    root, fork = len(commonprefix(contexts)), min(map(len, contexts))  # of all, of an item
    root = 0 if root * (len(items) - 1) < 256 else root  # saving fewer tokens is not worth a pass
    fork = root if (fork - root) * (len(rows) - len(items)) < 256 else fork
    cache: list[dict] = [{} for _ in model.blocks]
    read(model, cache, [contexts[0][:root]])
    cache = pick(cache, [0] * len(items))
    read(model, cache, [context[root:fork] for context in contexts])
    cache = pick(cache, [i for i, _ in rows])
    outputs = dict(zip(rows, read(model, cache, [ids[fork:] for _, ids in rows])))  # each [T, C]

    # A token is predicted at the position before it.
    x = [outputs[i, ids[:-1]][len(ids) - 1 - n - fork : len(ids) - 1 - fork] for i, ids, n in asked]
    targets = torch.tensor([token for _, ids, n in asked for token in ids[-n:]], device=x[0].device)
    log_p = []
    for part, wanted in zip(torch.cat(x).split(1024), targets.split(1024)):  # logits are large
        log_p.append(-F.cross_entropy(model.logits(part).float(), wanted, reduction="none").cpu())
    sums = iter(torch.cat(log_p).double().split([n for _, _, n in asked]))
    return [[next(sums).sum().item() for _ in item] for item in items]


def in_batches(run, items: list, batch_tokens=8192, groups=None, title="") -> list:
    """Apply run(batch) -> its results to all items, and return the results in the items' order."""
    parts = tasks.batches(items, groups or [""] * len(items), batch_tokens)
    done = share(lambda part: run([items[i] for i in part]), parts, title)
    results = {i: result for part, some in zip(parts, done) for i, result in zip(part, some)}
    return [results[i] for i in range(len(items))]


# -- What does a model write? ---------------------------------------------------------------------


def token_bytes(model: GPT, tokenizer) -> list[bytes]:
    """The text of each token id; empty for special tokens and for unused rows of the embedding."""
    text = [b""] * model.cfg.vocab_size
    for i in np.flatnonzero(data.bytes_per_token(tokenizer)):
        text[i] = tokenizer.decode_single_token_bytes(i)
    return text


def sample(model: GPT, tokenizer, prompt="", max_new_tokens=400, temperature=0.8, top_k=50) -> str:
    """The prompt and the model's continuation, up to the end of the document. An empty prompt
    starts a new document. torch.manual_seed makes the sample repeatable.
    """
    text = token_bytes(model, tokenizer)
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)]  # as in training
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    new = model.generate(idx, max_new_tokens, temperature, top_k)[0, len(ids) :].tolist()
    if tokenizer.eot_token in new:
        new = new[: new.index(tokenizer.eot_token)]
    return prompt + b"".join(text[i] for i in new).decode(errors="replace")


@torch.no_grad()
def complete(model: GPT, prompts: list[list[int]], finished) -> list[list[int]]:
    """Append the most likely next token to each prompt until finished(new tokens) -> new tokens.

    Reads all prompts up to the end of the shortest, and the rest of longer ones token by token.
    """
    texts, active = [list(ids) for ids in prompts], list(range(len(prompts)))
    new = lambda i: texts[i][len(prompts[i]) :]
    cache: list[dict] = [{} for _ in model.blocks]
    start, end = 0, min(map(len, prompts))
    while active:
        x = read(model, cache, [texts[i][start:end] for i in active])
        for i, token in zip(active, model.logits(x[:, -1]).argmax(-1).tolist()):
            if len(texts[i]) == end:
                texts[i].append(token)
        rows = [row for row, i in enumerate(active) if not new(i) or not finished(new(i))]
        if len(rows) < len(active):
            cache, active = pick(cache, rows), [active[row] for row in rows]
        start, end = end, end + 1
    return [new(i) for i in range(len(prompts))]


def write(model: GPT, tokenizer, prompts: list[str], task, max_len: int, batch_tokens=8192) -> list:
    """The model's answers, each up to a stop of the task. Overlong prompts keep their end."""
    text_of, most = token_bytes(model, tokenizer), task.max_new_tokens
    reach = max(len(stop.encode()) for stop in task.stops)  # a stop spans at most as many tokens

    def finished(new: list[int]) -> bool:
        tail = b"".join(text_of[i] for i in new[-reach:])
        ended = new[-1] == tokenizer.eot_token or len(new) == most
        return ended or any(stop.encode() in tail for stop in task.stops)

    encoded = [tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token] for prompt in prompts]
    items = [[(ids[most - max_len :] + [0] * most, most)] for ids in encoded]  # with room to write
    run = lambda batch: complete(model, [ids[:-most] for [(ids, _)] in batch], finished)
    texts = [b"".join(text_of[i] for i in new) for new in in_batches(run, items, batch_tokens)]
    first_stop = lambda text: min((text.split(stop)[0] for stop in task.stops), key=len)
    return [first_stop(text.decode(errors="replace")) for text in texts]


# -- The benchmarks -------------------------------------------------------------------------------


def answer(name: str, questions: list, model: GPT, tokenizer, max_len: int, batch_tokens=8192):
    """The model's answers to the questions of a task, in the form that tasks.measure takes."""
    task, likelihoods = tasks.TASKS[name], lambda batch: score(model, batch)
    if task.stops:
        prompts = [q.contexts[0] for q in questions]
        return write(model, tokenizer, prompts, task, max_len, batch_tokens)
    if task.metric == "word_perplexity":
        pages = [tasks.rolling_windows(tokenizer, q.choices[0], max_len) for q in questions]
        windows = [[window] for page in pages for window in page]
        sums = iter(in_batches(likelihoods, windows, batch_tokens, title=name))
        return [math.fsum(next(sums)[0] for _ in page) for page in pages]
    items = [tasks.requests(tokenizer, q, max_len) for q in questions]
    return in_batches(likelihoods, items, batch_tokens, [q.group for q in questions], name)


def evaluate(work: dict, model: GPT, tokenizer, args: argparse.Namespace) -> None:
    """Print the rows of each task and write args.out after it. work: task -> (questions, shots)."""
    first, results = rank_and_world()[0] == 0, {}  # process 0 reports
    say = print if first else lambda *_: None
    for name, (questions, shots) in work.items():
        answers = answer(name, questions, model, tokenizer, args.max_len, args.batch_tokens)
        facts = {"n": len(questions), "num_fewshot": shots, "max_len": args.max_len}
        facts["dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")
        if program := tasks.TASKS[name].program:
            facts["samples"] = str(Path(args.out or "").parent / name / "samples.jsonl")
            if first:  # before any program runs: the answers took hours
                tasks.write_samples(Path(facts["samples"]), questions, answers)
            programs = [program(q.doc, text) for q, text in zip(questions, answers)]
            answers = share(tasks.passes, programs, name) if args.allow_code_execution else []
        results[name] = tasks.measure(name, questions, answers) | facts
        say(tasks.report(name, results[name]))
        if args.out and first:  # now, because a later task may fail
            write_json(args.out, results | tasks.paper_average(results))
    for average in tasks.paper_average(results).values():
        say(f"the paper's Average: {average['average']:.4f} (six columns; ARC is a mean of two)")


# -- Command line ------------------------------------------------------------------------------

NUMBERS = {  # flag: default, smallest value, help
    "limit": (None, 1, "evaluate only the first N items of each task"),
    "num_fewshot": (None, 0, "examples before each question (default: as in the paper)"),
    "max_len": (None, 1, "tokens in the model's window (default: its seq_len)"),
    "batch_tokens": (8192, 1, "tokens in a forward pass (default: 8192)"),
    "max_new_tokens": (400, 0, "length of the sample (default: 400)"),
    "top_k": (50, 1, "sample from the N most likely tokens (default: 50)"),
    "seed": (0, 0, "random seed of the sample (default: 0)"),
    "temperature": (0.8, 0, "of the sample; 0 takes the most likely token (default: 0.8)"),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("eval.py", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="run folder, checkpoint, or Granite folder")
    add("--data", help="corpus (default: the run's); with --tasks, folder of TASK.jsonl, and for "
        "examples TASK.train.jsonl or mmlu.dev.jsonl (default: download them)")  # fmt: skip
    add("--tasks", help=f"comma-separated: {', '.join(tasks.TASKS)}")
    add("--prompt", help="continue this text instead of evaluating")
    for name, (default, _, text) in NUMBERS.items():
        kind = float if isinstance(default, float) else whole_number
        add(f"--{name}", type=kind, metavar="N", default=default, help=text)
    add("--out", type=Path, help="JSON file for the results of --tasks")
    add("--allow_code_execution", action="store_true", help="run what the model writes for "
        "humaneval and mbpp, with limits that are no security boundary: use a container")
    add("--device", default="auto", help="auto: cuda, else mps, else cpu")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of the weights")
    args = parser.parse_args(argv)
    for name, (_, least, _) in NUMBERS.items():
        if (value := getattr(args, name)) is not None and not least <= value < 2**63:
            raise ValueError(f"--{name} {value}: must be at least {least} and below 2**63")
    if 0 < args.temperature < 0.01:
        raise ValueError(f"--temperature {args.temperature}: must be 0 or at least 0.01")
    if args.out and (args.out.is_dir() or not args.out.parent.is_dir()):
        raise ValueError(f"--out {args.out}: must be a file in an existing folder")
    return args


def corpora(args: argparse.Namespace, cfg: GPTConfig) -> list[data.Corpus]:
    """The corpora to evaluate on. Raises ValueError or OSError if the model cannot read them."""
    files = [folder / "config.json" for folder in (args.model, *args.model.parents[:2])]
    config = next((json.loads(file.read_text()) for file in files if file.is_file()), {})
    if not args.data and "data" not in config:
        raise ValueError(f"--model {args.model}: names no corpus; choose one with --data")
    corpus = data.load_corpus(args.data or config["data"], config.get("tokenizer", "bytes"))
    for source in corpus.sources.values():
        check_corpus(cfg, source)
    try:
        trained, text = data.tokenizer_of(args.model), Path(__file__).read_text(encoding="utf-8")
    except (ValueError, OSError):
        return list(corpus.sources.values())  # the model does not say, so we trust --data
    if trained.encode_ordinary(text) != corpus.tokenizer.encode_ordinary(text):
        raise ValueError(f"--data {args.data}: has the tokenizer {corpus.tokenizer.name}, but "
                         f"{args.model} was trained with {trained.name}")  # fmt: skip
    return list(corpus.sources.values())


def set_up(argv: list[str] | None) -> tuple:
    """Read and check all input -> (args, model, tokenizer, questions or corpora)."""
    args = parse(argv)
    join(args.device)  # if torchrun started several processes
    model = load_model(args.model, pick_device(args.device), getattr(torch, args.dtype, None))
    if args.tasks is None and args.prompt is None:
        return args, model, None, corpora(args, model.cfg)
    tokenizer, seq_len = data.tokenizer_of(args.model), model.cfg.seq_len
    if tokenizer.n_vocab > model.cfg.vocab_size:
        raise ValueError(f"--model {args.model}: its embedding has fewer rows than its tokenizer")
    if (args.max_len or 0) > seq_len:
        raise ValueError(f"--max_len {args.max_len}: must be at most the model's seq_len {seq_len}")
    args.max_len = args.max_len or seq_len
    return args, model, tokenizer, tasks.prepare(args) if args.tasks is not None else {}


def main(argv: list[str] | None = None) -> int:
    try:
        args, model, tokenizer, work = set_up(argv)
    except (ValueError, OSError) as error:
        return fail("eval.py", error)
    if args.tasks is not None:
        evaluate(work, model, tokenizer, args)
    elif args.prompt is not None:
        torch.manual_seed(args.seed)
        lengths = args.max_new_tokens, args.temperature, args.top_k
        print(sample(model, tokenizer, args.prompt, *lengths))
    else:
        for corpus in work:
            loss, bpb = validation_loss(model, corpus).values()
            result = f"{loss:.4f} nats per token, {bpb:.4f} bits per byte"
            print(f"{args.model} on {corpus.path}: {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
