"""docs/elsewhere.md: every recipe is run with the library that it is for, and so is every trap."""

import copy
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim import AdamW, optimizer as torch_optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

import fit
import mup
import train
from config import make_shape
from model import GPT
from schedules import constant, decay, make_schedule, warmup
from test_fit import wsd_records
from test_mistakes import one_line

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/elsewhere.md").read_text(encoding="utf-8")
TRAINERS = ("nanoGPT", "Trainer", "Lightning", "Accelerate", "torchtitan", "OLMo-core")
RECOMPUTE = "recompute_lr("

MICRO, LENGTH = 2, 16  # sequences, and tokens per sequence
BATCH = 2 * MICRO * LENGTH  # tokens of a step of two micro-batches
OLD, NEW, SAVED = (
    10,
    20,
    9,
)  # steps: both ends, and the checkpoint, right before the decay
POWER = dict(power_a=0.5, power_b=-0.3, power_q=0.5, lr_max=0.01)  # as on the page


def recipe(word: str, number: int = 0) -> str:
    """A block of Python under the heading with this word, by default the first."""
    section = re.search(rf"^##+ [^\n]*{re.escape(word)}.*?(?=^##|\Z)", PAGE, re.M | re.S)
    return re.findall(r"```python\n(.*?)```", section[0], re.S)[number]


def rates(steps: int, first: int = 0) -> list[float]:
    """The learning rates of the steps from `first` of a run of so many steps, by schedules.py."""
    total = steps * BATCH
    schedule = make_schedule(SimpleNamespace(
        **POWER, schedule="power", total_tokens=total, warmup_tokens=3 * BATCH,
        decay_tokens=total / 10, decay_shape="exp", batch_size=2 * MICRO, seq_len=LENGTH,
    ))  # fmt: skip
    return [schedule(BATCH * step + BATCH / 2) for step in range(first, steps)]


def script(**names) -> dict:
    """The names that a script has after the first block of the page, with the run above."""
    found = {"__name__": __name__}  # dataclass looks its module up
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], found)
    return found | dict(batch_tokens=BATCH, warmup_tokens=3 * BATCH) | names


def for_steps(steps: int, **names) -> dict:
    """`script` with a schedule to this step."""
    found = script(**names)
    # functions look up names where they were made, so change them there
    found["schedule_to"].__globals__.update(found)
    found = found["schedule_to"].__globals__
    found["total_tokens"] = steps * BATCH
    found["schedule"] = found["schedule_to"](steps * BATCH)
    return found


class Model(torch.nn.Module):
    """A model that a Trainer accepts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(LENGTH))

    def forward(self, x, labels=None):
        loss = ((x * self.weight).sum(-1) - 1).square().mean()
        return {"loss": loss}


def sequences(steps: int) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * MICRO * steps, LENGTH, generator=generator)
    return [{"x": one} for one in x]


def loss_of(model, batch):
    return model(batch["x"])["loss"]


def loader(steps: int, first: int = 0):
    examples = sequences(steps)[2 * MICRO * first :]
    return torch.utils.data.DataLoader(examples, batch_size=MICRO)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture
def seen():
    """The learning rates of all groups in every step that an optimizer of torch takes."""
    found = []

    def look(optimizer, args, kwargs):
        if type(optimizer) is not AdamW:  # but torchtitan's container of optimizers
            return
        groups = [group["lr"] for group in optimizer.param_groups]
        if any(groups):  # torchtitan takes a step with learning rate 0 to make the state
            found.append(groups)

    handle = torch_optimizer.register_optimizer_step_pre_hook(look)
    yield found
    handle.remove()


# -- One function per trainer: run to `steps`, from a checkpoint or from the start ---------
#
# It executes the code of the page and returns the checkpoint at step SAVED.


def in_plain_loop(code, steps, checkpoint):
    model = Model()
    optimizer = AdamW(model.parameters())
    first = SAVED if checkpoint else 0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    saved = {}

    def micro_batches(it):
        if it == SAVED:
            saved["model"] = copy.deepcopy(model.state_dict())
            saved["optimizer"] = copy.deepcopy(optimizer.state_dict())
        return [{"x": torch.randn(MICRO, LENGTH)} for _ in range(2)]

    exec(code, for_steps(
        steps, model=model, optimizer=optimizer, first_step=first, loss_of=loss_of,
        micro_batches=micro_batches,
    ))  # fmt: skip
    return saved


def in_trainer(code, steps, checkpoint):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(
        "out", max_steps=steps, per_device_train_batch_size=MICRO, save_steps=SAVED,
        gradient_accumulation_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        max_grad_norm=0, save_only_model=False, remove_unused_columns=False,
    )  # fmt: skip
    exec(code, for_steps(
        steps, model=Model(), args=args, dataset=sequences(steps), checkpoint=checkpoint
    ))  # fmt: skip
    return f"out/checkpoint-{SAVED}"


def in_lightning(code, steps, checkpoint):
    L = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch):
            return loss_of(self.model, batch)

    save = L.pytorch.callbacks.ModelCheckpoint(
        "lightning", "{step}", every_n_train_steps=SAVED, save_top_k=-1
    )
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=2, logger=False,
        callbacks=[save], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    exec(code, for_steps(
        steps, YourModule=Module, trainer=trainer, loader=loader(steps),
        checkpoint=checkpoint,
    ))  # fmt: skip
    return f"lightning/step={SAVED}.ckpt"


def in_accelerate(code, steps, checkpoint):
    pytest.importorskip("accelerate")
    first = SAVED if checkpoint else 0
    exec(code, for_steps(
        steps, model=Model(), loader=loader(steps, first), checkpoint=checkpoint,
        loss_of=loss_of, save_every=SAVED,
    ))  # fmt: skip
    return f"step-{SAVED}"


def in_torchtitan(code, steps, checkpoint):
    """With its optimizers, schedulers and format of checkpoints, and its order of calls."""
    reason = "torchtitan is not installed"
    optimizer = pytest.importorskip(
        "torchtitan.components.optimizer.optimizer", reason=reason
    )
    from torch.distributed import checkpoint as dcp

    script = for_steps(steps)
    exec(code, script)
    model = Model()
    config = optimizer.default_adamw(lr=1.0)
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    schedulers = script["PowerLR"]().build(optimizers=optimizers, training_steps=steps)
    states = {"model": model, "optimizer": optimizers, "lr_scheduler": schedulers}
    with warnings.catch_warnings(action="ignore"):
        if checkpoint:
            dcp.load(states, checkpoint_id=checkpoint, no_dist=True)
        for step in range(SAVED if checkpoint else 0, steps):
            if step == SAVED and not checkpoint:
                dcp.save(states, checkpoint_id="titan", no_dist=True)
            optimizers.zero_grad()
            for batch in loader(1):
                (loss_of(model, batch) / 2).backward()
            optimizers.step()
            schedulers.step()
    return "titan"


def in_olmo_core(code, steps, checkpoint):
    """With its schedulers, called as its train module does, after the tokens were counted."""
    pytest.importorskip(
        "olmo_core.optim.scheduler", reason="ai2-olmo-core is not installed"
    )
    script = for_steps(steps)
    exec(code, script)
    scheduler = script["PowerAtMiddle"]()
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1.0)
    trainer = SimpleNamespace(max_tokens=steps * BATCH, global_train_tokens_seen=0)
    first = 0
    if checkpoint:
        optimizer.load_state_dict(checkpoint)
        first = SAVED
        trainer.global_train_tokens_seen = SAVED * BATCH
    for step in range(first, steps):
        if step == SAVED:
            saved = copy.deepcopy(optimizer.state_dict())
        trainer.global_train_tokens_seen += BATCH
        loss_of(model, next(iter(loader(1)))).backward()
        for group in optimizer.param_groups:
            scheduler.set_lr(group, trainer)
        optimizer.step()
    return saved


RUN = dict(zip(TRAINERS, (
    in_plain_loop, in_trainer, in_lightning, in_accelerate, in_torchtitan, in_olmo_core
)))  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_learning_rates_are_ours_before_and_after_the_run_is_extended(name, seen):
    checkpoint = RUN[name](recipe(name), OLD, None)
    assert [lr for (lr,) in seen] == rates(OLD)
    seen.clear()
    RUN[name](recipe(name), NEW, checkpoint)
    assert [lr for (lr,) in seen] == rates(NEW, first=SAVED)


@pytest.mark.parametrize("name", ["Trainer", "Lightning", "Accelerate", "torchtitan"])
def test_without_the_line_the_first_resumed_step_follows_the_old_end(name, seen):
    code = re.sub(rf"\b{re.escape(RECOMPUTE)}.+\)$", "pass", recipe(name), flags=re.M)
    assert code != recipe(name)
    checkpoint = RUN[name](code, OLD, None)
    seen.clear()
    RUN[name](code, NEW, checkpoint)
    assert [lr for (lr,) in seen] == [rates(OLD)[SAVED], *rates(NEW)[SAVED + 1 :]]


def test_without_interval_step_the_rate_of_lightning_never_moves(seen):
    code = recipe("Lightning")
    forgotten = code.replace(', "interval": "step"', "")
    assert forgotten != code
    in_lightning(forgotten, OLD, None)
    assert [lr for (lr,) in seen] == [rates(OLD)[0]] * OLD


def test_in_nanochat_every_group_follows_the_schedule_below_its_peak():
    """Its loop, `group["lr"] = group["initial_lr"] * lrm`, with a peak per group."""
    names = for_steps(OLD)
    exec(recipe("nanochat"), names)
    peak = max(rates(OLD))
    for step, lr in enumerate(rates(OLD)):
        ours = lr / names["schedule"](3 * BATCH)
        assert 0.02 * names["get_lr_multiplier"](step) == pytest.approx(
            0.02 * ours, rel=1e-12
        )
    assert names["peak"] >= peak  # at the warmup's end, between the middles of two steps


def test_recipes_are_short():
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 20, code


# -- Traps of LambdaLR -------------------------------------------------------------------


class Object:
    """A callable object, which LambdaLR saves."""

    def __init__(self, schedule):
        self.schedule = schedule

    def __call__(self, step):
        return self.schedule((step + 0.5) * BATCH)


@pytest.mark.parametrize("kind", ["lambda", "object"])
def test_a_callable_object_brings_its_old_end_back(kind):
    def build(steps):
        names = for_steps(steps)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        if kind == "object":
            return names, LambdaLR(optimizer, Object(names["schedule"]))
        return names, names["make_scheduler"](optimizer, names["schedule"])

    _, old = build(OLD)
    for _ in range(SAVED):
        old.optimizer.step()
        old.step()
    names, new = build(NEW)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    found = []
    for _ in range(SAVED, NEW):
        names["recompute_lr"](new)
        found.append(new.optimizer.param_groups[0]["lr"])
        assert new.get_last_lr() == [found[-1]]  # what trainers log
        new.optimizer.step()
        new.step()
    if kind == "lambda":
        assert found == rates(NEW, first=SAVED)
    else:
        assert found[0] == rates(OLD)[SAVED]
        assert all(
            lr < right / 2 for lr, right in zip(found[1:], rates(NEW)[SAVED + 1 :])
        )


# -- muP's groups in a foreign loop ------------------------------------------------------

WIDE = make_shape(n_layer=1, n_embd=32, n_head=2, seq_len=16, vocab_size=64, base_width=8)


def steps_of_groups(groups, seen) -> list[list[float]]:
    names = for_steps(OLD)
    scheduler = names["make_scheduler"](AdamW(groups), names["schedule"])
    for _ in range(OLD):
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def test_groups_of_mup_train_at_their_rates_without_lr(seen):
    groups = mup.param_groups(GPT(WIDE), mup.rules(WIDE), weight_decay=0.1)
    scales = [group["lr_scale"] for group in groups]
    assert scales == [1, 1 / 4, 1 / 4, 1]
    found = steps_of_groups(groups, seen)
    assert found == [[scale * lr for scale in scales] for lr in rates(OLD)]


def test_groups_without_lr_would_train_at_a_thousandth(seen):
    """The trap that `lr` in the groups avoids."""
    groups = mup.param_groups(GPT(WIDE), mup.rules(WIDE), weight_decay=0.1)
    for group in groups:
        del group["lr"]
    found = steps_of_groups(groups, seen)
    assert found == [[0.001 * lr] * 4 for lr in rates(OLD)]


def test_a_plain_loop_multiplies_the_factors_of_mup(seen):
    model = GPT(WIDE)
    groups = mup.param_groups(model, mup.rules(WIDE), weight_decay=0.1)
    scales = [group["lr_scale"] for group in groups]
    tokens = torch.randint(64, (MICRO, LENGTH + 1))
    exec(recipe("nanoGPT"), for_steps(
        OLD, model=model, optimizer=AdamW(groups), first_step=0,
        loss_of=lambda model, batch: model(batch[:, :-1], batch[:, 1:])[0],
        micro_batches=lambda it: [tokens, tokens],
    ))  # fmt: skip
    assert seen == [[lr * scale for scale in scales] for lr in rates(OLD)]


def test_mup_makes_its_groups_when_copied_alone(tmp_path):
    shutil.copy(ROOT / "mup.py", tmp_path)
    code = """
import types, torch, mup
cfg = types.SimpleNamespace(m_width=4, init_std=0.02)
model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "q": torch.nn.Linear(4, 4, False)})
table = mup.rules(cfg)
mup.init_weights(model, table)
groups = mup.param_groups(model, table, weight_decay=0.1)
print([group["lr"] for group in torch.optim.AdamW(groups).param_groups])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1.0, 0.25]\n"


# -- The average -------------------------------------------------------------------------


def test_the_average_of_torch_is_ours():
    model = torch.nn.Linear(3, 2).double()
    ours = copy.deepcopy(model)
    names = dict(model=model)
    exec(recipe("Average as here"), names)
    theirs = names["average"]
    assert isinstance(theirs, AveragedModel)
    for step in range(50):
        for p in model.parameters():
            p.data = torch.randn_like(p)
        theirs.update_parameters(model)
        train.update_average(ours, model, BATCH * step, BATCH * (step + 1))
        for a, b in zip(theirs.module.parameters(), ours.parameters()):
            assert torch.equal(a, b)


def test_the_average_has_a_half_life_of_4_percent_of_the_run():
    """As torchtitan counts it: decay = 2^(-1 / (half_life_fraction * steps))."""
    for steps in (1000, 10**6):
        ours = 1 - (1 - 1 / steps) ** 17
        theirs = 1 - 2 ** (-1 / (0.041 * steps))
        assert theirs == pytest.approx(ours, rel=0.01)
        assert 0.5 ** (1 / 17) == pytest.approx(
            0.96, abs=1e-3
        )  # half the weight is later


# -- What other schedules give the first and the last step -------------------------------

N, W, D = 40, 5, 8  # steps of the run, of its warmup and of its decay


def test_the_ends_of_our_schedule():
    lr = decay(warmup(constant(1.0), W), N, D, "linear")
    assert (lr(0.5), lr(N - 0.5)) == pytest.approx((1 / (2 * W), 1 / (2 * D)))


def test_the_ends_of_a_schedule_of_transformers():
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    phases = dict(num_warmup_steps=W, num_decay_steps=D, num_training_steps=N)
    factor = transformers.get_wsd_schedule(
        optimizer, **phases, decay_type="linear"
    ).lr_lambdas[0]
    assert (factor(0), factor(N - 1)) == pytest.approx((0, 1 / D))


def test_the_ends_of_a_schedule_of_torchtitan():
    titan = pytest.importorskip(
        "torchtitan.components.optimizer.lr_scheduler",
        reason="torchtitan is not installed",
    )
    config = titan.LRSchedulersContainer.Config(warmup_steps=W, decay_ratio=D / N)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    (scheduler,) = config.build(optimizers=[optimizer], training_steps=N)
    (factor,) = scheduler.lr_lambdas
    assert (factor(0), factor(N - 1)) == pytest.approx((1 / W, 1 / D))


def test_the_ends_of_a_schedule_of_olmo_core():
    olmo = pytest.importorskip(
        "olmo_core.optim.scheduler", reason="ai2-olmo-core is not installed"
    )
    schedule = olmo.WSD(warmup=W, decay=D, decay_fraction=None)
    # its trainer counts a step before it takes it
    assert schedule.get_lr(1.0, 1, N) == pytest.approx(1 / W)
    assert schedule.get_lr(1.0, N, N) == 0


# -- Laws from elsewhere -----------------------------------------------------------------


def sweep() -> list[dict]:
    """Runs of one width and seed."""
    return wsd_records(noise=0.002, seeds=1, widths=[32])


def rows_of(records: list[dict]) -> list[dict]:
    kept = ("lr", "batch_size", "total_tokens", "val_loss", "seq_len")
    return [{name: r[name] for name in kept} for r in records]


def write_table(path: str, runs: list[dict], encoding: str = "utf-8"):
    with open(path, "w", encoding=encoding, newline="") as file:
        table = csv.DictWriter(file, runs[0].keys(), quoting=csv.QUOTE_ALL)
        table.writeheader()
        table.writerows(runs)


def law_of_table(columns: str) -> dict:
    """The law that fit.py writes for runs.csv."""
    assert fit.main(["runs.csv", "--columns", f"{columns},seq_len=128", "--out=law"]) == 0
    return json.loads(Path("law/law.json").read_text())


def assert_same_law(one: dict, other: dict) -> None:
    for name in ("a", "b", "q", "b_interval", "total_tokens", "batch_tokens"):
        assert one[name] == pytest.approx(other[name])


def wandb_run(r: dict, **changed) -> dict:
    """A line of the table that W&B exports, with its first columns and its quotes."""
    return {
        "Name": f"run, {r['lr']:.2e}", "State": "finished", "Notes": "two\nlines", "User": "me",
        "Tags": "", "Created": "2026-07-01T00:00:00.000Z", "Runtime": "61", "Sweep": "",
        "batch_size": str(r["batch_size"]), "lr": repr(r["lr"]),
        "tokens": str(r["total_tokens"]), "val/loss": repr(r["val_loss"]),
    } | changed  # fmt: skip


OF_WANDB = (
    "total_tokens=tokens,val_loss=val/loss"  # and lr, batch_size, State as they are
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_an_export_of_wandb_gives_the_law_of_its_finished_runs(encoding, capsys):
    records = sweep()
    runs = [wandb_run(r) for r in records]
    # a run that crashed, between two learning rates of its cell, and one without anything
    better = dict(lr=records[5]["lr"] * 1.2, val_loss=records[4]["val_loss"] - 0.02)
    runs.append(wandb_run(records[5] | better, State="crashed"))
    runs.append(dict.fromkeys(runs[0], "") | {"State": "failed"})
    if encoding == "utf-8-sig":  # the mark hides the name of the first column
        runs = [{"lr": run["lr"]} | run for run in runs]
    write_table("runs.csv", runs, encoding)
    found = law_of_table(OF_WANDB)
    assert_same_law(found, fit.law_of(rows_of(records)))
    said = capsys.readouterr().out
    assert "left out 2 runs that did not finish: 1 crashed, 1 failed" in said
    write_table("runs.csv", [run | {"State": "finished"} for run in runs[:-1]])
    assert abs(law_of_table(OF_WANDB)["b"] - found["b"]) > 0.005


def test_the_command_of_the_page_reads_a_table_of_wandb():
    records = sweep()
    write_table("runs.csv", [wandb_run(r) for r in records])
    section = PAGE.partition("## A law from your own table")[2]
    command = re.search(r"^python fit.py (runs.csv .*)$", section, re.M)[1]
    assert fit.main(shlex.split(command.replace("seq_len=2048", "seq_len=128"))) == 0
    law = json.loads(Path("law.json").read_text())
    assert_same_law(law, fit.law_of(rows_of(records)))


@pytest.mark.parametrize("no_loss", ["", "NaN", "inf"])
def test_a_table_of_mlflow_gives_the_law_and_an_empty_loss_is_a_diverged_run(
    no_loss, capsys
):
    """As mlflow.search_runs().to_csv writes it: NaN is an empty cell, and parameters are text."""
    records = sweep()
    highest = max(range(len(records)), key=lambda i: records[i]["lr"])
    records[highest]["val_loss"] = None
    runs = []
    for r in records:
        runs.append({
            "run_id": "0ed92ae8", "experiment_id": "1", "status": "FINISHED",
            "start_time": "2026-11-25 04:40:05.512+00:00",
            "metrics.val_loss": no_loss if r["val_loss"] is None else r["val_loss"],
            "metrics.tokens": float(r["total_tokens"]), "params.batch_size": r["batch_size"],
            "params.lr": r["lr"], "tags.mlflow.runName": "invincible-gnat-559",
        })  # fmt: skip
    runs.append(
        runs[0] | {"status": "FAILED", "metrics.val_loss": 9.0, "metrics.tokens": ""}
    )
    write_table("runs.csv", runs)
    found = law_of_table(
        "state=status,lr=params.lr,batch_size=params.batch_size,"
        "total_tokens=metrics.tokens,val_loss=metrics.val_loss"
    )
    assert_same_law(found, fit.law_of(rows_of(records)))
    said = capsys.readouterr().out
    assert "1 failed" in said and "1 runs diverged" in said


def test_a_seed_of_a_table_is_that_of_a_sweep(capsys):
    """Also if one table has no seeds, which are then 0. Words for seeds fit only other words."""
    records = wsd_records(noise=0.002, seeds=2, widths=[32])
    zero, one = [[r for r in records if r["seed"] == seed] for seed in (0, 1)]
    Path("sweep.jsonl").write_text("\n".join(map(json.dumps, rows_of(zero))))
    write_table("one.csv", [row | {"seed": "1"} for row in rows_of(one)])
    argv = ["sweep.jsonl", "one.csv", "--columns", "seq_len=128", "--out=law"]
    assert fit.main(argv) == 0
    rows = [row | {"seed": r["seed"]} for row, r in zip(rows_of(records), records)]
    assert_same_law(json.loads(Path("law/law.json").read_text()), fit.law_of(rows))
    write_table("one.csv", [row | {"seed": "one"} for row in rows_of(one)])
    capsys.readouterr()
    assert "some seeds are words" in one_line(fit.main, argv, capsys)


def test_a_field_of_the_table_chooses_runs():
    records = sweep()
    runs = [wandb_run(r) | {"wd": "0.1"} for r in records]
    runs += [wandb_run(r | {"lr": 2 * r["lr"]}) | {"wd": "0"} for r in records]
    write_table("runs.csv", runs)
    columns = f"{OF_WANDB},seq_len=128,weight_decay=wd"
    argv = ["runs.csv", "--columns", columns, "--only", "weight_decay=0"]
    assert fit.main(argv) == 0
    law = json.loads(Path("law.json").read_text())
    assert law["a"] == pytest.approx(2 * fit.law_of(rows_of(records))["a"])


def changed(column: str, value: str):
    """A table in which row 7 has another value in a column."""
    return lambda runs: runs[5].update({column: value})


def without(column: str):
    return lambda runs: [run.pop(column) for run in runs]


@pytest.mark.parametrize("change, says", [
    (changed("tokens", "1,024"), "row 7: total_tokens is '1,024', not a plain number"),
    (changed("lr", "0,01"), "row 7: lr is '0,01', not a plain number"),
    (changed("lr", "auto"), "row 7: lr is 'auto'"), (changed("lr", ""), "row 7: lr is ''"),
    (changed("lr", "-0.1"), "row 7: a record has lr -0.1"),
    (changed("lr", "inf"), "row 7: a record has lr inf"),
    (changed("val/loss", "high"), "row 7: val_loss is 'high'"),
    (lambda runs: runs.append(runs[3]), "rows 5 and 182 are the same run"),
    (without("lr"), "no column lr; name yours"), (without("val/loss"), "val_loss=val/loss: not in"),
    (without("batch_size"), "row 2: a record has no batch_size"),
])  # fmt: skip
def test_an_odd_table_is_one_line_that_names_the_row(change, says, capsys):
    runs = [wandb_run(r) for r in sweep()]
    change(runs)
    write_table("runs.csv", runs)
    argv = ["runs.csv", "--columns", OF_WANDB]
    assert says in one_line(fit.main, argv, capsys)
    assert not Path("law.json").exists()


@pytest.mark.parametrize("text, says", [
    (b"lr,tokens\n0.1,1,024\n", "row 2 has 3 fields, and the header 2"),
    (b"lr,tokens\n\xff\xfe\n", "not a CSV file in UTF-8"), (b"", "no column lr"),
    (b"lr,total_tokens,val_loss\n", "no records"),
])  # fmt: skip
def test_a_file_that_is_no_table_is_one_line(text, says, capsys):
    Path("runs.csv").write_bytes(text)
    columns = "val_loss=2,total_tokens=tokens" if b"tokens" in text[:9] else "seq_len=2"
    assert says in one_line(fit.main, ["runs.csv", "--columns", columns], capsys)


def event_writer(folder: str):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def test_event_files_of_tensorboard_give_the_law():
    records = [r for r in sweep() if r["batch_size"] == 2]
    records += [r | {"batch_size": 4, "lr": r["lr"] * 1.5} for r in records]
    found = []
    for batch_size in (2, 4):
        for i, r in enumerate(r for r in records if r["batch_size"] == batch_size):
            # a trainer's step, not tokens; the rates of a warmup, of WSD, and of its decay
            steps = r["total_tokens"] // (batch_size * 100)
            with event_writer(f"{batch_size}/events/{i:02}") as writer:
                for step, share in ((1, 0.1), (steps // 2, 1.0), (steps, 0.05)):
                    writer.add_scalar("lr", share * r["lr"], step)
                    writer.add_scalar("val/loss", r["val_loss"] + 1 - step / steps, step)
        names = dict(batch_tokens=batch_size * 100)
        code = recipe("A law from your own table")
        exec(code.replace('"events"', f'"{batch_size}/events"'), names)
        found += names["rows"]
    expected = [
        dict(lr=r["lr"], total_tokens=r["total_tokens"], val_loss=r["val_loss"],
             batch_tokens=r["batch_size"] * 100)
        for r in records
    ]  # fmt: skip
    law, right = fit.law_of(found), fit.law_of(expected)
    for name in ("a", "b", "q"):
        assert law[name] == pytest.approx(right[name], rel=1e-4)  # events are float32


# -- The mirror of a run -----------------------------------------------------------------


def test_metrics_become_events_at_their_tokens():
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = [
        {"tokens": 100_000, "loss": 4.96, "lr": 0.01, "max_load": [3.0, 1.3]},
        {"tokens": 200_000, "loss": None, "lr": 0.005},
        {"tokens": 200_000, "val_loss": 2.2},
    ]
    Path("runs/a").mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path("runs/a/metrics.jsonl").write_text(text)
    exec(recipe("Watch a run"), {})
    events = EventAccumulator("runs/a/tensorboard")
    events.Reload()
    points = {
        name: [(p.step, p.value) for p in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    near = lambda value: pytest.approx(value, rel=1e-6)
    assert points == {
        "loss": [(100_000, near(4.96))],
        "lr": [(100_000, near(0.01)), (200_000, near(0.005))],
        "val_loss": [(200_000, near(2.2))],
    }
