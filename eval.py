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

import signal

if __name__ == "__main__":  # Ctrl-C ends us without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch, see train.py

import numpy as np
import torch
import torch.nn.functional as F

import data
import tasks
from model import GPT, load_model
from tools import devices, files, flags, tokenizers
from tools.flags import UserError

NOT_FINITE = "its outputs are not numbers; choose a checkpoint from before it diverged"


def tokens_per_pass(model: GPT) -> int:
    """Tokens that the model reads at once. More would not fit into the cache of a CPU."""
    return 2**11 if model.embed.weight.is_cpu else 2**13


# -- Validation loss ---------------------------------------------------------------------


@torch.no_grad()
def validation_loss(
    model: GPT, source: data.Corpus, max_tokens: int | None = None
) -> dict:
    """Mean cross-entropy on the validation split, in whole sequences of the model's seq_len.

    Returns val_loss, in nats per token, and val_bpb, in bits per byte of the targets
    (end-of-text has no bytes), which is comparable across tokenizers. max_tokens limits
    the work to about that many tokens, always the same sequences, from all documents.
    Several processes share the work.
    """
    seq_len = model.cfg.seq_len
    device = next(model.parameters()).device

    # 1. Choose the sequences, the first of a fixed random order
    n = data.n_sequences(source.val, seq_len)
    used = data.n_sequences(source.val, seq_len, max_tokens)
    index = data.shuffled(np.arange(used), n, seed=0)  # [used]

    # 2. Divide them into batches
    batch_size = max(1, tokens_per_pass(model) // seq_len)
    batches = np.array_split(index, math.ceil(used / batch_size))

    # 3. Add up the loss and the bytes of all targets
    rank, world = devices.rank_and_world()
    nats = 0.0
    n_bytes = 0.0
    was_training = model.training
    model.eval()
    for batch in batches[rank::world]:
        inputs, targets = data.read_sequences(source.val, batch, seq_len)  # both [B, T]
        n_bytes += source.lengths[targets].sum()
        inputs = torch.from_numpy(inputs).to(device)
        targets = torch.from_numpy(targets).to(device)
        loss, _ = model(inputs, targets)  # the mean over all targets
        nats += loss.item() * targets.numel()
    model.train(was_training)

    # 4. Add the sums of all processes
    sums = devices.all_sum(torch.tensor([nats, n_bytes], dtype=torch.float64))
    nats, n_bytes = sums.tolist()
    return {
        "val_loss": nats / (used * seq_len),
        "val_bpb": nats / (math.log(2) * n_bytes),
    }


# -- How likely is a text? ---------------------------------------------------------------


@torch.no_grad()
def score(model: GPT, requests: list[tasks.Request], title="") -> list[float]:
    """Log-probability of every request, the sum over its last n tokens, in nats.

    Several processes share the work.
    """
    # 1. The model reads all tokens but the last. It reads equal inputs once, as of the
    # four letters of a question of MMLU
    of_input = {}  # input -> numbers of its requests
    for i, request in enumerate(requests):
        of_input.setdefault(tuple(request.ids[:-1]), []).append(i)

    # 2. Divide the inputs into batches of similar length, to have little padding
    batches = []
    for row in sorted(of_input, key=len, reverse=True):
        longest = len(batches[-1][0]) if batches else 0
        if not batches or (len(batches[-1]) + 1) * longest > tokens_per_pass(model):
            batches.append([])
        batches[-1].append(row)

    # 3. Score every batch in one of the processes
    def score_batch(rows: list[tuple]) -> list[tuple[int, float]]:
        # a causal model cannot see the zeros
        padded = [row + (0,) * (len(rows[0]) - len(row)) for row in rows]
        outputs, _ = model.hidden(torch.tensor(padded, device=model.embed.weight.device))
        scored = []
        for x, row in zip(outputs, rows):  # x [T, C]
            for i in of_input[row]:
                ids = requests[i].ids
                n = requests[i].n
                # the model predicts a token at the position before it
                logits = model.logits(x[len(row) - n : len(row)]).float()
                targets = torch.tensor(ids[-n:], device=x.device)
                nats = F.cross_entropy(logits, targets, reduction="sum").item()
                scored.append((i, -nats))
        return scored

    scored = devices.share(score_batch, batches, title)

    # 4. Put the results into the order of the requests
    results = [0.0] * len(requests)
    for pairs in scored:
        for i, log_p in pairs:
            results[i] = log_p
    return results


# -- Text from a model -------------------------------------------------------------------


def sample(
    model: GPT, tokenizer, prompt="", max_new_tokens=400, temperature=0.8, top_k=50
) -> str:
    """Return the prompt and a continuation, up to the end of the document."""
    # a document starts after an end-of-text, as in training
    read = tokenizer.encode_ordinary(prompt)
    ids = [tokenizer.eot_token, *read]
    idx = torch.tensor([ids], device=next(model.parameters()).device)  # [1, T]
    idx = model.generate(idx, max_new_tokens, temperature, top_k)
    new = idx[0, len(ids) :].tolist()
    if tokenizer.eot_token in new:
        new = new[: new.index(tokenizer.eot_token)]
    # a model may also write special tokens, and ids that its tokenizer does not use
    has_text = set(np.flatnonzero(tokenizers.bytes_per_token(tokenizer)).tolist())
    new = [i for i in new if i in has_text]
    # a tokenizer may write no space before the first token of a text
    text = tokenizer.decode(read + new)
    return prompt + text[len(tokenizer.decode(read)) :]


# -- The benchmarks ----------------------------------------------------------------------


def answer(
    name: str, questions: list[tasks.Question], model: GPT, tokenizer, max_len: int
) -> tuple[list, dict]:
    """Log-likelihoods of the choices of every question, or of its page of wikitext, in nats.

    Also returns tasks.count_notes of the questions.
    """
    items = []  # the requests of every question
    for question in questions:
        if name == "wikitext":
            page = question.choices[0]
            items.append(list(tasks.rolling_windows(tokenizer, page, max_len)))
        else:
            items.append(list(tasks.requests(tokenizer, question, max_len)))
    flat = []
    for item in items:
        flat += item
    sums = score(model, flat, name)
    answers = []
    for item in items:
        answers.append(sums[: len(item)])
        sums = sums[len(item) :]
    if name == "wikitext":
        answers = [math.fsum(windows) for windows in answers]
    return answers, tasks.count_notes(questions, items)


def evaluate(model: GPT, args: argparse.Namespace) -> None:
    """Print the scores of the tasks in args.tasks, and write them to args.out."""
    tokenizer = data.tokenizer_of(model.run)
    args.max_len = args.max_len or model.cfg.seq_len
    rank, _ = devices.rank_and_world()
    results = {}
    for name, (questions, shots) in tasks.prepare(args, model.cfg.seq_len).items():
        # 1. All processes score the questions
        answers, notes = answer(name, questions, model, tokenizer, args.max_len)
        if not np.isfinite(np.hstack(answers)).all():
            raise UserError(f"--model {args.model}: {NOT_FINITE}")
        facts = {
            "n": len(questions),
            "num_fewshot": shots,
            "max_len": args.max_len,
            "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
        }
        results[name] = tasks.measure(name, questions, answers) | facts | notes

        # 2. Process 0 reports, and saves after every task, because a later one may fail
        if rank == 0:
            tasks.report(name, results[name])
        if rank == 0 and args.out:
            files.write_json(args.out, files.nan_to_none(results))


# -- Command line ------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = flags.program_parser("eval.py", __doc__)
    add = parser.add_argument
    zero_or_more = flags.at_least(0)
    one_or_more = flags.at_least(1)
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
    add("--limit", type=one_or_more, help="evaluate only the first N items of each task")
    add(
        "--num_fewshot",
        type=zero_or_more,
        help="examples before a question (default: as in the paper)",
    )
    add(
        "--max_len",
        type=one_or_more,
        help="tokens in the window (default: seq_len of the model)",
    )
    add("--out", type=Path, help="JSON file for the results of --tasks")
    add("--prompt", help="continue this text instead of evaluating")
    add("--max_new_tokens", type=zero_or_more, help="length of the sample (default: 400)")
    add("--top_k", type=one_or_more, help="sample from the N likeliest (default: 50)")
    add(
        "--temperature",
        type=flags.at_least(0, float),
        help="0: likeliest (default: 0.8)",
    )
    add("--seed", type=zero_or_more, help="random seed of the sample (default: 0)")
    add("--device", default="auto", help="auto: cuda, else mps, else cpu")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of weights",
    )
    args = parser.parse_args(argv)
    for name in ("limit", "num_fewshot", "max_len"):
        value = getattr(args, name)
        if value is not None and not args.tasks:
            raise UserError(f"--{name} {value}: has no effect without --tasks")
    for name in ("max_new_tokens", "top_k", "temperature", "seed"):
        value = getattr(args, name)
        if value is not None and args.prompt is None:
            raise UserError(f"--{name} {value}: has no effect without --prompt")
    if args.prompt is not None and args.tasks:
        raise UserError("--prompt: has no effect with --tasks")
    if args.temperature and args.temperature < 1e-3:
        raise UserError(f"--temperature {args.temperature}: must be 0 or at least 0.001")
    if args.seed and args.seed >= 2**63:
        raise UserError(f"--seed {args.seed}: must be below 2^63")
    if args.out:
        is_possible = args.out.parent.is_dir() and not args.out.is_dir()
        if not args.tasks or not is_possible:
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
    known = model.token_hash or data.token_hash(data.tokenizer_of(config))
    data.check_tokenizer(corpus, known, args.model)
    for source in corpus.sources.values():
        data.check_corpus(model.cfg, source)
        with devices.mixed_precision(args):
            losses = validation_loss(model, source)
        if not math.isfinite(losses["val_loss"]):
            raise UserError(f"--model {args.model}: {NOT_FINITE}")
        rank, _ = devices.rank_and_world()
        if rank == 0:
            loss = f"{losses['val_loss']:.4f} nats per token"
            bpb = f"{losses['val_bpb']:.4f} bits per byte"
            print(f"{args.model} on {source.path}: {loss}, {bpb}")


@torch.no_grad()
def print_sample(model: GPT, args: argparse.Namespace) -> None:
    """Print the prompt and its continuation."""
    tokenizer = data.tokenizer_of(model.run)
    start = torch.tensor([[tokenizer.eot_token]], device=args.device)
    if not model(start).isfinite().all():
        raise UserError(f"--model {args.model}: {NOT_FINITE}")
    torch.manual_seed(args.seed or 0)
    given = {}
    for name in ("max_new_tokens", "temperature", "top_k"):
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    text = sample(model, tokenizer, args.prompt, **given)
    print(text or "(the model ended the text at once)")


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        devices.join(args.device)  # if torchrun started several processes
        args.device = devices.pick_device(args.device)
        # cuDNN would compile its attention again for every length of a text
        torch.backends.cuda.enable_cudnn_sdp(False)
        dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
        model = load_model(args.model, args.device, dtype)
        rank, _ = devices.rank_and_world()
        if model.averaged and rank == 0:
            text = f"{args.model}: its averaged weights, which replace a decay"
            print(text, file=sys.stderr)
        if args.tasks:
            evaluate(model, args)
        elif args.prompt is not None:
            if rank == 0:
                print_sample(model, args)
        else:
            print_loss(model, args)
    except (UserError, OSError) as error:
        return flags.fail("eval.py", error)
    return 0


if __name__ == "__main__":
    devices.leave(main())
