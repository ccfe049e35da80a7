"""The Python code of docs/elsewhere.md runs, in the loops that it is for."""

import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import mup
from config import GPTConfig
from model import GPT
from schedules import constant, decay, power_law, warmup

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/elsewhere.md").read_text(encoding="utf-8")


def block(heading: str) -> str:
    """The first block of Python under a heading."""
    section = PAGE.partition(f"# {heading}\n")[2]
    return re.search(r"```python\n(.*?)```", section, re.S)[1]


# -- The schedule ------------------------------------------------------------------------

BATCH = 8 * 128  # tokens of a step, on the page


def take_home(T: float, lr0="0.0144 / 2", b="0", **names) -> dict:
    """The names that a script has after the lines of the page, with its own T."""
    lines = block("Take it home").replace('float("inf")', "run_length", 1)
    lines = lines.replace("0.0144 / 2, 0 ", f"{lr0}, {b} ", 1)
    names |= dict(run_length=T)
    exec(lines, names)
    return names


def rates(T: float, steps: int, first: int = 0, power=False) -> list[float]:
    """The same from schedules.py, with the other numbers of the page."""
    trunk = constant(0.0072)
    if power:
        trunk = power_law(0.0108 * 164e3**0.3, -0.3, 1.0, math.inf)
    schedule = warmup(trunk, 98e3)
    if T < math.inf:
        schedule = decay(schedule, T, 0.3 * T, "linear")
    return [schedule(BATCH * (step + 0.5)) for step in range(first, steps)]


@pytest.mark.parametrize("T", [math.inf, 200 * BATCH, 2.62e6])
def test_the_lines_to_take_home_are_half_and_power(T):
    steps = int(min(T, 3e6) // BATCH)
    for power in (False, True):
        more = dict(lr0="0.0108", b="-0.3") if power else {}
        get_lr = take_home(T, **more)["get_lr"]
        expected = rates(T, steps, power=power)
        assert [get_lr(it) for it in range(steps)] == pytest.approx(expected)


def test_the_lines_of_readme_are_wsd_and_power_in_the_names_of_nanogpt():
    """Its loop has a step more than max_iters, in which nothing may go up."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.search(r"```python\n(# five pilots.*?)```", readme, re.S)[1]
    steps = 2560
    names = dict(learning_rate=0.01, max_iters=steps, warmup_iters=96)
    of_power = power_law(0.01 * 160**0.3, -0.3, 1.0, math.inf)
    for text, trunk in (
        (lines, constant(0.01)),
        (lines.replace("# lr *=", "lr *="), of_power),
    ):
        schedule = decay(warmup(trunk, 96), steps, 0.3 * steps, "linear")
        exec(text, names)
        found = [names["get_lr"](it) for it in range(steps + 1)]
        expected = [schedule(it + 0.5) for it in range(steps)]
        assert found == pytest.approx([*expected, 0.0])


def test_a_lambda_lr_trains_the_groups_of_mup_at_their_learning_rates():
    cfg = GPTConfig(
        n_layer=1, n_embd=32, n_head=2, seq_len=16, vocab_size=64, base_width=8
    )
    optimizer = AdamW(mup.param_groups(GPT(cfg), mup.rules(cfg), weight_decay=0.1))
    names = take_home(200 * BATCH, optimizer=optimizer, LambdaLR=LambdaLR)
    exec(re.search(r"`(scheduler = .*?)`", PAGE)[1], names)
    for lr in rates(200 * BATCH, 200):
        found = [group["lr"] for group in optimizer.param_groups]
        assert found == pytest.approx([lr, lr / 4, lr / 4, lr], rel=1e-12)
        optimizer.step()
        names["scheduler"].step()


class Model(torch.nn.Module):
    """A model that the Trainer accepts."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, labels=None):
        return {"loss": (x * self.weight - 1).square().mean()}


def test_the_trainer_follows_the_schedule_also_after_the_run_is_extended(monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    seen = []
    step = AdamW.step

    def look(optimizer, *args):
        seen.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *args)

    monkeypatch.setattr(AdamW, "step", look)
    for steps, checkpoint in ((150, None), (240, "out/checkpoint-75")):
        args = transformers.TrainingArguments(
            "out", max_steps=steps, per_device_train_batch_size=1, save_steps=75,
            use_cpu=True, report_to="none", disable_tqdm=True,
            remove_unused_columns=False,
        )  # fmt: skip
        names = take_home(steps * BATCH, model=Model(), args=args, checkpoint=checkpoint)
        names["dataset"] = [{"x": torch.ones(1)}] * steps
        exec(block("The Trainer of transformers"), names)
    expected = rates(150 * BATCH, 150)
    expected += rates(240 * BATCH, 240, first=75)  # 75 is before the first decay
    assert seen == pytest.approx(expected)


# what Rigel Base logged: trillions of tokens -> learning rate, both rounded.
# https://github.com/open-lm-engine/open-lm-engine.github.io, results/lr.json at 4a84ffb
RIGEL = {0.01: 0.00424, 0.12745: 0.009995, 0.12863: 0.009948, 0.1299: 0.009898}
RIGEL |= {0.13089: 0.00986, 0.13203: 0.009817, 0.13316: 0.009774, 0.135: 0.009706}


def test_power_has_the_learning_rates_of_a_production_run():
    step = 1152 * 4096  # tokens. It logged every tenth
    schedule = warmup(power_law(4, -0.51, 1152, lr_max=0.01), 5000 * step)
    for trillions, lr in RIGEL.items():
        n = round(trillions * 1e12 / (10 * step)) * 10 * step
        assert round(schedule(n), 6) == lr
