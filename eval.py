"""How good is a model? Its validation loss, a sample of its writing, and benchmark
scores.

The scores agree with lm-evaluation-harness. A model is a run folder, a checkpoint or
released weights. Read `validation_loss`, then `score` (how likely is a text?). For tasks
in which the model writes an answer, such as GSM8K, export it and run the harness itself
(docs/evaluate.md).

    python eval.py --model runs/laptop-power-1                 loss on the whole validation split
    python eval.py --model runs/laptop-power-1 --prompt "def " continues a text
    python eval.py --model DIR --tasks arc_easy,piqa --data FOLDER    FOLDER/arc_easy.jsonl, ...
    torchrun --nproc_per_node 8 eval.py --model DIR --tasks mmlu --data FOLDER    on eight GPUs
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
from model import GPT, Cache, load_model
from tools import tasks
from tools.flags import UserError, at_least, fail, program_parser
from tools.devices import (
    all_sum,
    join,
    leave,
    mixed_precision,
    pick_device,
    rank_and_world,
    share,
)
from tools.files import write_json

NOT_FINITE = "its outputs are not numbers; choose a checkpoint from before it diverged"

# -- Validation loss ---------------------------------------------------------------------


@torch.no_grad()
def validation_loss(
    model: GPT, source: data.Corpus, max_tokens: int | None = None
) -> dict:
    """Mean cross-entropy on the validation split, in whole sequences of the model's
    seq_len.

    Returns val_loss, in nats per token, and val_bpb, in bits per byte of the targets
    (end-of-text has no bytes), which is comparable across tokenizers. max_tokens limits
    the work to about that many tokens, always the same sequences, from all documents.
    Several processes share the work.
    """
    seq_len, device = model.cfg.seq_len, next(model.parameters()).device
    used = data.n_sequences(source.val, seq_len, max_tokens)
    index = data.shuffled(np.arange(used), data.n_sequences(source.val, seq_len), seed=0)
    lengths = data.bytes_per_token(source.tokenizer)
    most = (
        2**11 if device.type == "cpu" else 2**13
    )  # tokens per pass, for the cache of a CPU
    rank, world = rank_and_world()
    nats, n_bytes, was_training = 0.0, 0, model.training
    model.eval()
    for part in np.array_split(index, math.ceil(used / max(1, most // seq_len)))[
        rank::world
    ]:
        inputs, targets = data.read_sequences(source.val, part, seq_len)  # both [B, T]
        loss, _ = model(
            torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
        )
        nats += loss.item() * targets.size
        n_bytes += int(lengths[targets].sum())
    model.train(was_training)
    nats, n_bytes = all_sum(torch.tensor([nats, n_bytes], dtype=torch.float64)).tolist()
    return {
        "val_loss": nats / (used * seq_len),
        "val_bpb": nats / (math.log(2) * n_bytes),
    }


# -- How likely is a text? ---------------------------------------------------------------


def pick(cache: list[Cache], rows: list[int]) -> list[Cache]:
    """The keys and values of these rows of the batch. A row may appear several times."""
    return [layer.pick(rows) for layer in cache]


def read(model: GPT, cache: list[Cache], rows: list[list[int]]) -> torch.Tensor:
    """Run rows of tokens after the cached tokens -> the output of the last block, [B, T,
    C]."""
    T = max(map(len, rows))
    padded = [
        row + [0] * (T - len(row)) for row in rows
    ]  # a causal model cannot see the zeros
    return model.hidden(torch.tensor(padded, device=model.embed.weight.device), cache)[0]


@torch.no_grad()
def score(model: GPT, items: list[list[tasks.Request]]) -> list[list[float]]:
    """Sum the log-probabilities (in nats) of the requested tokens, for all requests of
    all items.

    The requests of an item are its answer choices, which share a context. So we read the
    batch as a tree, first the few-shot examples that all items share, then the contexts,
    then the choices.
    """
    contexts = [commonprefix([ids[: -n - 1] for ids, n in item]) for item in items]
    shared, fork = len(commonprefix(contexts)), min(map(len, contexts))
    root = shared if shared >= 32 else 0  # a few tokens are not worth a pass
    cache = [Cache() for _ in model.blocks]
    if root:
        read(model, cache, [contexts[0][:root]])
        cache = pick(cache, [0] * len(items))
    if fork > root:
        read(model, cache, [context[root:fork] for context in contexts])
    requests = [(i, ids, n) for i, item in enumerate(items) for ids, n in item]
    cache = pick(cache, [i for i, _, _ in requests])
    outputs = read(model, cache, [ids[fork:-1] for _, ids, _ in requests])

    sums: list[list[float]] = [[] for _ in items]
    for x, (i, ids, n) in zip(outputs, requests):  # x [T, C]
        end = len(ids) - 1 - fork  # the model predicts a token at the position before it
        logits = model.logits(x[end - n : end]).float()
        targets = torch.tensor(ids[-n:], device=x.device)
        sums[i].append(-F.cross_entropy(logits, targets, reduction="sum").item())
    return sums


def score_all(model: GPT, items: list, groups=None, title="", batch_tokens=8192) -> list:
    """`score` of any number of items, in their order, by batches of at most batch_tokens.

    A batch holds items of similar length, to have little padding, and of one group,
    because these probably start alike. Several processes share the batches.
    """
    groups = groups or [""] * len(items)
    length = [max(len(ids) for ids, _ in item) for item in items]
    batches, rows, longest = [], 0, None  # the longest item is the first of its batch
    for i in sorted(range(len(items)), key=lambda i: (groups[i], -length[i])):
        rows += len(items[i])
        if (
            longest is None
            or groups[i] != groups[longest]
            or rows * length[longest] > batch_tokens
        ):
            longest, rows = i, len(items[i])
            batches.append([])
        batches[-1].append(i)
    done = share(lambda batch: score(model, [items[i] for i in batch]), batches, title)
    results = {i: x for batch, some in zip(batches, done) for i, x in zip(batch, some)}
    return [results[i] for i in range(len(items))]


# -- What does a model write? ------------------------------------------------------------


def sample(
    model: GPT, tokenizer, prompt="", max_new_tokens=400, temperature=0.8, top_k=50
) -> str:
    """Return the prompt and a continuation, up to the end of the document."""
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)]  # as in training
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    new = model.generate(idx, max_new_tokens, temperature, top_k)[0, len(ids) :].tolist()
    if tokenizer.eot_token in new:
        new = new[: new.index(tokenizer.eot_token)]
    has_text = np.flatnonzero(
        data.bytes_per_token(tokenizer)
    )  # not special or unused ids
    return prompt + tokenizer.decode([i for i in new if i in has_text])


# -- The benchmarks ----------------------------------------------------------------------


def answer(
    name: str, questions: list[tasks.Question], model: GPT, tokenizer, max_len: int
) -> list:
    """Log-likelihoods of the choices of every question, or of its page of wikitext, in
    nats."""
    if name == "wikitext":
        pages = [
            list(tasks.rolling_windows(tokenizer, q.choices[0], max_len))
            for q in questions
        ]
        sums = iter(
            score_all(model, [[window] for page in pages for window in page], title=name)
        )
        return [math.fsum(next(sums)[0] for _ in page) for page in pages]
    items = [list(tasks.requests(tokenizer, q, max_len)) for q in questions]
    return score_all(model, items, [q.group for q in questions], name)


def evaluate(model: GPT, args: argparse.Namespace) -> None:
    """Print the scores of the tasks in args.tasks, and write them to args.out."""
    tokenizer = data.tokenizer_of(model.run)
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    args.max_len = args.max_len or model.cfg.seq_len
    first, results = rank_and_world()[0] == 0, {}  # process 0 reports
    for name, (questions, shots) in tasks.prepare(args, model.cfg.seq_len).items():
        answers = answer(name, questions, model, tokenizer, args.max_len)
        if not np.isfinite(np.hstack(answers)).all():
            raise UserError(f"--model {args.model}: {NOT_FINITE}")
        facts = dict(
            n=len(questions), num_fewshot=shots, max_len=args.max_len, dtype=dtype
        )
        results[name] = tasks.measure(name, questions, answers) | facts
        if first:
            tasks.report(name, results[name])
        if first and args.out:  # now, because a later task may fail
            content = json.loads(json.dumps(results), parse_constant=lambda _: None)
            write_json(
                args.out, content
            )  # with null for infinity, as JSON has no such number


# -- Command line ------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("eval.py", __doc__)
    add, zero, one = parser.add_argument, at_least(0), at_least(1)
    add(
        "--model",
        type=Path,
        required=True,
        help="run folder, checkpoint, or Granite folder",
    )
    add(
        "--data",
        help="corpus (default: as in training), or with --tasks, folder of TASK.jsonl; "
        "its examples are TASK.train.jsonl or mmlu.dev.jsonl",
    )
    add("--tasks", help=f"comma-separated: {', '.join(tasks.TASKS)}")
    add("--limit", type=one, help="evaluate only the first N items of each task")
    add(
        "--num_fewshot",
        type=zero,
        help="examples before a question (default: as in the paper)",
    )
    add(
        "--max_len", type=one, help="tokens in the window (default: seq_len of the model)"
    )
    add("--out", type=Path, help="JSON file for the results of --tasks")
    add("--prompt", help="continue this text instead of evaluating")
    add(
        "--max_new_tokens",
        type=zero,
        default=400,
        help="length of the sample (default: 400)",
    )
    add(
        "--top_k",
        type=one,
        default=50,
        help="sample from the N likeliest tokens (default: 50)",
    )
    add(
        "--temperature",
        type=at_least(0, float),
        default=0.8,
        help="0: likeliest (default: 0.8)",
    )
    add("--seed", type=zero, default=0, help="random seed of the sample (default: 0)")
    add("--device", default="auto", help="auto: cuda, else mps, else cpu")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of weights",
    )
    args = parser.parse_args(argv)
    for name in ("limit", "num_fewshot", "max_len"):
        if getattr(args, name) is not None and not args.tasks:
            raise UserError(
                f"--{name} {getattr(args, name)}: has no effect without --tasks"
            )
    if args.out and (not args.tasks or args.out.is_dir() or not args.out.parent.is_dir()):
        raise UserError(
            f"--out {args.out}: needs --tasks, and a file in an existing folder"
        )
    return args


def print_loss(model: GPT, args: argparse.Namespace) -> None:
    """Print the validation loss on args.data, or on the corpus of the run."""
    config = model.run
    if not args.data and "data" not in config:
        raise UserError(f"--model {args.model}: names no corpus; choose one with --data")
    if args.dtype == "auto":  # compute as in training, to find the loss of the record
        args.dtype = config.get("dtype", "float32")
    corpus = data.load_corpus(args.data or config["data"], config["tokenizer"])
    data.check_tokenizer(args.model, config, corpus)
    for source in corpus.sources.values():
        data.check_corpus(model.cfg, source)
        with mixed_precision(args):
            loss, bpb = validation_loss(model, source).values()
        if rank_and_world()[0] == 0:
            text = f"{loss:.4f} nats per token, {bpb:.4f} bits per byte"
            print(f"{args.model} on {source.path}: {text}")


@torch.no_grad()
def print_sample(model: GPT, args: argparse.Namespace) -> None:
    """Print the prompt and its continuation."""
    tokenizer = data.tokenizer_of(model.run)
    start = torch.tensor([[tokenizer.eot_token]], device=args.device)
    if not model(start).isfinite().all():
        raise UserError(f"--model {args.model}: {NOT_FINITE}")
    torch.manual_seed(args.seed)
    lengths = args.max_new_tokens, args.temperature, args.top_k
    text = sample(model, tokenizer, args.prompt, *lengths)
    print(text or "(the model ended the text at once)")


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        join(args.device)  # if torchrun started several processes
        args.device = pick_device(args.device)
        model = load_model(
            args.model, args.device, getattr(torch, args.dtype, None)
        )  # None: auto
        if model.averaged and rank_and_world()[0] == 0:
            print(
                f"{args.model}: its averaged weights, which replace a decay",
                file=sys.stderr,
            )
        if args.tasks:
            evaluate(model, args)
        elif args.prompt is not None:
            print_sample(model, args)
        else:
            print_loss(model, args)
    except (UserError, OSError) as error:
        return fail("eval.py", error)
    return 0


if __name__ == "__main__":
    leave(main())
