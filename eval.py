"""How good is a model? Held-out loss, bits per byte, and a look at what it writes.

Read `held_out_loss`.

    python eval.py --model runs/laptop-power-1                      loss on all held-out text
    python eval.py --model runs/laptop-power-1 --prompt "def "      lets it continue a text
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import data
from model import GPT, GPTConfig, load_model, pick_device

# ---------------------------------------------------------------------------------------------
# Held-out loss


def rank_and_world() -> tuple[int, int]:
    """Which of how many processes this is; (0, 1) where there is only one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over all processes of a tensor, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


@torch.no_grad()
def held_out_loss(model: GPT, corpus: data.Corpus, max_tokens: int | None = None) -> dict[str, float]:
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


def sample(model: GPT, tokenizer, prompt: str = "", max_new_tokens: int = 400, temperature: float = 0.8, top_k: int | None = 50) -> str:
    """The prompt and what the model writes behind it, up to the end of the document.

    An empty prompt starts a new document. torch.manual_seed makes it repeatable.
    """
    known = data.bytes_per_token(tokenizer) > 0
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)]  # documents begin after end-of-text
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    new = model.generate(idx, max_new_tokens, temperature, top_k)[0, len(ids) :].tolist()
    if tokenizer.eot_token in new:
        new = new[: new.index(tokenizer.eot_token)]
    # a model may have more rows than its tokenizer has tokens, and likes none of the others at first
    return prompt + tokenizer.decode([t for t in new if t < len(known) and known[t]])


# ---------------------------------------------------------------------------------------------


def trained_on(model: Path) -> data.Corpus | data.Mixture:
    """The corpus or mixture of the run that this folder, or checkpoint in a run's folder, belongs to."""
    run = model if model.is_dir() else model.parent.parent
    try:
        config = json.loads((run / "config.json").read_text())
    except OSError:
        raise FileNotFoundError(f"{model}: not in the folder of a run, name its corpus with --data") from None
    return data.load_corpus(config["data"], config["tokenizer"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="eval.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", type=Path, required=True, help="folder of a run, or a checkpoint")
    parser.add_argument("--data", help="corpus to evaluate on (default: the one that the run was trained on)")
    parser.add_argument("--prompt", help="continue this text instead of evaluating")
    parser.add_argument("--max_new_tokens", type=int, default=400, help="length of the sample (default: 400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    parser.add_argument("--top_k", type=int, default=50, help="sample among so many likeliest tokens (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--device", default="auto", help="auto: cuda, else mps, else cpu")
    args = parser.parse_args(argv)
    try:
        for name, least, most in (("max_new_tokens", 0, 10**9), ("top_k", 1, 10**9), ("temperature", 0, 1000), ("seed", 0, 2**63 - 1)):
            if not least <= getattr(args, name) <= most:
                raise ValueError(f"--{name} {getattr(args, name)}: must be between {least} and {most}")
        if 0 < args.temperature < 0.01:
            raise ValueError(f"--temperature {args.temperature}: must be 0 or at least 0.01")
        model = load_model(args.model, pick_device(args.device))
        corpus = data.load_corpus(args.data) if args.data else trained_on(args.model)
        for source in corpus.sources.values():
            check_corpus(model.cfg, source)
    except (ValueError, OSError) as mistake:
        print(f"eval.py: {mistake}", file=sys.stderr)
        return 2
    if args.prompt is not None:
        torch.manual_seed(args.seed)
        print(sample(model, corpus.tokenizer, args.prompt, args.max_new_tokens, args.temperature, args.top_k))
    else:
        for source in corpus.sources.values():
            result = held_out_loss(model, source)
            print(f"{args.model} on {source.path}: {result['val_loss']:.4f} nats per token, {result['val_bpb']:.4f} bits per byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
