"""The Python code of docs/elsewhere.md and docs/mup.md runs, in the loops that it is for."""

import contextlib
import copy
import csv
import io
import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from torch.optim import AdamW, optimizer as torch_optimizer

import config
import fit
import mup
import schedules
from config import GPTConfig
from model import GPT
from schedules import make_schedule

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "elsewhere.md").read_text(encoding="utf-8")
MUP = (DOCS / "mup.md").read_text(encoding="utf-8")

# -- The schedule ------------------------------------------------------------------------

MICRO, LENGTH = 2, 16  # sequences, and tokens per sequence
BATCH = 2 * MICRO * LENGTH  # tokens of a step of two micro-batches
OLD, NEW, SAVED = 10, 20, 9  # steps: two ends, and the checkpoint before the first decay


def block(heading: str) -> str:
    """The first block of Python under a heading."""
    section = PAGE.partition(f"# {heading}")[2]
    return re.search(r"```python\n(.*?)```", section, re.S)[1]


def script(**names) -> dict:
    """The names that a script has after the first block of the page."""
    found = {}
    exec(block("The schedule"), found)
    found |= dict(batch_tokens=BATCH, warmup_tokens=3 * BATCH) | names
    return found


def rates(steps: int, first: int = 0) -> list[float]:
    """The learning rates of train.py from step `first` to the end."""
    cfg = config.make_config(
        total_tokens=steps * BATCH, warmup_tokens=3 * BATCH, batch_size=2 * MICRO,
        seq_len=LENGTH, power_a=0.5, power_b=-0.3, power_q=0.5, lr_max=0.01,
        decay_share=0.3,
    )  # fmt: skip
    schedule = make_schedule(cfg)
    return [schedule(BATCH * (step + 0.5)) for step in range(first, steps)]


@pytest.fixture
def seen():
    """The learning rates of all groups in every step of an optimizer."""
    found = []

    def look(optimizer, args, kwargs):
        found.append([group["lr"] for group in optimizer.param_groups])

    handle = torch_optimizer.register_optimizer_step_pre_hook(look)
    yield found
    handle.remove()


class Model(torch.nn.Module):
    """A model that the Trainer accepts."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(LENGTH))

    def forward(self, x, labels=None):
        return {"loss": ((x * self.weight).sum(-1) - 1).square().mean()}


WIDE = GPTConfig(n_layer=1, n_embd=32, n_head=2, seq_len=16, vocab_size=64, base_width=8)


def mup_groups() -> list[dict]:
    return mup.param_groups(GPT(WIDE), mup.rules(WIDE), weight_decay=0.1)


def test_the_plain_loop_follows_the_schedule_also_with_the_groups_of_mup(seen):
    groups = mup_groups()
    names = script(
        model=Model(), optimizer=AdamW(groups), total_tokens=OLD * BATCH, first_step=2,
        loss_of=lambda model, x: model(x)["loss"],
        micro_batches=lambda it: [torch.ones(MICRO, LENGTH)] * 2,
    )  # fmt: skip
    exec(block("A plain loop"), names)
    scales = [group["lr_scale"] for group in groups]
    assert scales == [1, 1 / 4, 1 / 4, 1]
    assert seen == [[lr * scale for scale in scales] for lr in rates(OLD, first=2)]


def test_the_trainer_follows_the_schedule_also_after_the_run_is_extended(
    seen, monkeypatch
):
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(steps: int, checkpoint: str | None) -> None:
        args = transformers.TrainingArguments(
            "out", max_steps=steps, per_device_train_batch_size=MICRO, save_steps=SAVED,
            gradient_accumulation_steps=2, use_cpu=True, report_to="none",
            disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        dataset = [{"x": torch.ones(LENGTH)}] * (2 * MICRO * steps)
        names = script(model=Model(), args=args, dataset=dataset, checkpoint=checkpoint)
        exec(block("The Trainer"), names)

    run(OLD, None)
    assert [lr for (lr,) in seen] == rates(OLD)
    seen.clear()
    run(NEW, f"out/checkpoint-{SAVED}")
    assert [lr for (lr,) in seen] == rates(NEW, first=SAVED)


# -- A law from your own table -----------------------------------------------------------


def test_the_command_of_the_page_finds_the_law_of_a_table():
    best = schedules.best_lr
    law = schedules.PAPER_LAW._replace(a=3.0, b=-0.4, q=0.6)
    rows = []
    for batch, T, j in itertools.product((4, 8), (10**6, 4 * 10**6), range(-4, 5)):
        lr = best(T, batch * 2048 / 4096, law) * 2 ** (j / 2)
        row = {"lr": lr, "batch_size": batch, "tokens": T + j, "State": "finished"}
        rows.append(row | {"val/loss": 2 + 0.01 * j**2})
    rows.append(rows[4] | {"val/loss": 0.1, "State": "crashed"})
    with open("runs.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys())
        table.writeheader()
        table.writerows(rows)
    section = PAGE.partition("## A law from your own table")[2]
    command = re.search(r"^python fit.py (.*)$", section, re.M)[1]
    assert fit.main(shlex.split(command)) == 0
    found = fit.files.read_json(Path("law.json"))
    assert [found[name] for name in "abq"] == pytest.approx([3.0, -0.4, 0.6], rel=0.01)


# -- Logs --------------------------------------------------------------------------------


def test_the_lines_for_wandb_send_a_run(monkeypatch):
    """To a stand-in for wandb, every line at its tokens."""
    lines = [{"tokens": 128, "loss": 5.5}, {"tokens": 256, "val_loss": 5.0}]
    folder = Path("runs/laptop-power-1")
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.json").write_text(json.dumps({"config": {"lr": 0.01}}))
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    exec(block("Logs in W&B"), {})
    wandb.init.assert_called_once_with(project="power", config={"lr": 0.01})
    sent = wandb.init.return_value.log.call_args_list
    assert sent == [mock.call(line, step=line["tokens"]) for line in lines]


# -- docs/mup.md -------------------------------------------------------------------------

NUMBER = r"[+-]\d\.\d\d"


@pytest.fixture(scope="module")
def page():
    """The names that the blocks of mup.md define, and (printed, shown) outputs."""
    names = {}
    outputs = []
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", MUP, re.M | re.S):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(text, names)
        elif language == "text":
            outputs.append((printed.getvalue(), text))
    return names, outputs


def test_the_checks_print_what_the_page_shows(page):
    _, outputs = page
    assert len(outputs) == 3
    for printed, shown in outputs:
        assert re.sub(NUMBER, "N", printed) == re.sub(NUMBER, "N", shown)
        ours, theirs = (list(map(float, re.findall(NUMBER, x))) for x in (printed, shown))
        assert ours == pytest.approx(theirs, abs=0.05)


MULTIPLIERS = dict(m_width=3.0, m_emb=5.0, m_res=0.3)


@torch.no_grad()
def shaken(model):
    """The model in eval mode, with random weights, gains and biases."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.add_(0.2 * torch.randn_like(p))
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(torch.arange(40).view(2, 20)).logits


def test_a_llama_with_the_multipliers_is_a_granite(page):
    names, _ = page
    shape = names["shape"](64)
    granite = transformers.GraniteForCausalLM(transformers.GraniteConfig(
        **shape, attention_multiplier=1 / 16, logits_scaling=3.0, embedding_multiplier=5.0,
        residual_multiplier=0.3,
    ))  # fmt: skip
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    llama.load_state_dict(shaken(granite).state_dict())  # the same names
    names["add_multipliers_to_llama"](llama, **MULTIPLIERS)
    assert torch.allclose(logits(llama), logits(granite), rtol=1e-4, atol=1e-5)


def test_a_gpt2_with_the_multipliers_has_them_as_in_its_weights(page):
    names, _ = page
    shape = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=64, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hooked = shaken(transformers.GPT2LMHeadModel(shape))
    plain = copy.deepcopy(hooked)
    names["add_multipliers_to_gpt2"](hooked, **MULTIPLIERS)
    with torch.no_grad():
        plain.transformer.wte.weight *= 5.0
        plain.transformer.wpe.weight *= 5.0
        for part in plain.transformer.h:
            part.attn.c_attn.weight[:, :64] *= 16**0.5 / 16  # the queries
            part.attn.c_attn.bias[:64] *= 16**0.5 / 16
            for module in (part.attn.c_proj, part.mlp.c_proj):
                module.weight *= 0.3
                module.bias *= 0.3
        plain.transformer.ln_f.weight /= 3.0
        plain.transformer.ln_f.bias /= 3.0
    assert torch.allclose(logits(hooked), logits(plain), rtol=1e-4, atol=1e-5)
