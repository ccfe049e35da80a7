"""Training, from one step to the record, and the mistakes of a user of train.py."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import config
import data
import train
from conftest import FEW_VALIDATED, MOE, SMALL, STEP, argv, files_in, metrics, newest
from conftest import record_of
from eval import load_model
from schedules import lr_by_law, make_schedule
from tools import files


# -- A run -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule, shape", [("power", MOE), ("cosine", {})])
def test_a_run_learns_and_leaves_a_complete_folder(
    schedule, shape, corpus_path, figures, capsys
):
    typed = argv(data=corpus_path, schedule=schedule, keep_checkpoints=99, **shape)
    assert train.main(typed) == 0
    run = Path(f"runs/laptop-{schedule}-1")
    record = record_of(run)
    cfg = config.make_config(**record["config"])

    # 1. It learns, with the learning rates of the middles of its steps
    lines = metrics(run)
    lr_at = make_schedule(cfg)
    assert [line["lr"] for line in lines] == [lr_at(STEP * (i + 0.5)) for i in range(30)]
    assert lines[0]["loss"] == pytest.approx(math.log(256), rel=0.05)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.5
    assert all("max_load" in line for line in lines) == (shape == MOE)

    # 2. Its record has the loss of the newest checkpoint
    results = record["results"]
    checks = metrics(run, "val_loss")
    assert [line["tokens"] // STEP for line in checks] == [10, 20, 30]
    model = load_model(run)
    corpus = data.open_corpus(corpus_path)
    expected = train.validation_loss(model, corpus)
    assert results["val_loss"] == pytest.approx(expected, rel=1e-6)
    bits = expected / math.log(2) / corpus.meta["bytes_per_token"]
    assert results["val_bpb"] == pytest.approx(bits, rel=1e-6)
    assert results["val_loss"] == checks[-1]["val_loss"] < lines[0]["loss"] - 1.5
    assert results["tokens"] == 30 * STEP and results["diverged"] is False
    assert results["n_params"] == sum(w.numel() for w in model.parameters())
    assert record["config"].keys() == config.FIELDS.keys()
    assert record["config"]["fingerprint"] == corpus.meta["fingerprint"]

    # 3. Its other files. It saves every tenth of its length, if not more often
    saved = [int(path.stem) // STEP for path in Path(run, "ckpt").iterdir()]
    assert sorted(saved) == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert (run / "sample.txt").read_text(encoding="utf-8") in capsys.readouterr().out


def test_a_mixture_validates_in_its_shares(corpus_path, numbers_path):
    fields = dict(total_tokens=2 * STEP, warmup_tokens=0, out="run")
    fields["data"] = f"{corpus_path}:0.75,{numbers_path}:0.25"
    assert train.main(argv(**fields)) == 0
    results = record_of("run")["results"]
    nats = 0.75 * results[f"val_loss_{corpus_path}"]
    nats += 0.25 * results[f"val_loss_{numbers_path}"]
    corpora = [data.open_corpus(folder) for folder in (corpus_path, numbers_path)]
    size = [corpus.meta["bytes_per_token"] for corpus in corpora]
    bits = nats / math.log(2) / (0.75 * size[0] + 0.25 * size[1])
    assert results["val_loss"] == pytest.approx(nats, rel=1e-6)
    assert results["val_bpb"] == pytest.approx(bits, rel=1e-6)
    loss = train.validation_loss(load_model("run"), corpora[1])
    assert results[f"val_loss_{numbers_path}"] == pytest.approx(loss, rel=1e-6)


def test_a_run_that_diverges_has_a_record_and_no_checkpoint_with_nan(
    corpus_path, figures, monkeypatch
):
    """Also if the loss is NaN between two lines of the log."""
    real = train.optimizer_step
    n_steps = [0]

    def spoil(cfg, model, *args):
        n_steps[0] += 1
        step = real(cfg, model, *args)
        if n_steps[0] == 11:
            next(model.parameters()).data[0] = math.nan
        return step

    monkeypatch.setattr(train, "optimizer_step", spoil)
    assert train.main(argv(data=corpus_path, out="run", log_every=10**6)) == 0
    results = record_of("run")["results"]
    assert results["diverged"] is True and results["tokens"] == 12 * STEP
    assert results["val_loss"] is results["val_bpb"] is None
    assert "NaN" not in Path("run/metrics.jsonl").read_text()  # which is not JSON
    saved = newest("run")
    assert saved["tokens"] == 9 * STEP  # 30 steps save every third
    assert all(weight.isfinite().all() for weight in saved["model"].values())


def test_each_seed_changes_the_run_and_each_run_gets_a_folder(corpus_path):
    few = dict(data=corpus_path, total_tokens=STEP, warmup_tokens=0, **FEW_VALIDATED)
    for changed in ({}, {"seed": 1}, {"data_seed": 1}, {}):
        assert train.main(argv(**few, **changed)) == 0
    losses = [metrics(f"runs/laptop-power-{i}")[0]["loss"] for i in (1, 2, 3, 4)]
    assert len(set(losses)) == 3 and losses[0] == losses[3]


def test_a_run_with_a_law_has_its_settings_and_keeps_it(corpus_path, capsys):
    """Its learning rate, and all that its runs shared. It says what differs."""
    law = dict(a=2.0, b=-0.2, q=0.5, schedule="power", decay_share=0.1, first_n=500.0)
    law |= dict(assumed=["b"], measured=dict(total_tokens=[900, 1200]))
    law |= dict(settings=dict(weight_decay=0.2, data=str(corpus_path)))
    files.write_json(Path("law.json"), law)
    fields = dict(total_tokens=6 * STEP, out="run", weight_decay=0.3, **FEW_VALIDATED)
    assert train.main([*argv(**fields), "--law=law.json"]) == 0
    said = capsys.readouterr().out
    assert "weight_decay 0.3 (was 0.2)" in said and "total_tokens 1.54k" in said
    cfg = record_of("run")["config"]
    assert (cfg["law"], cfg["data"]) == (law, str(corpus_path))
    ceiling = float(f"{2 * (256 / 4096) ** 0.5 * 500**-0.2:.4g}")
    found = [cfg[name] for name in ("power_a", "power_b", "power_q", "lr_max")]
    assert found == [2.0, -0.2, 0.5, ceiling]

    # a branch uses the law again, without the file
    Path("law.json").unlink()
    branch = f"--branch=run --schedule=wsd --total_tokens={9 * STEP} --out=branch"
    assert train.main(branch.split()) == 0
    cfg = config.make_config(**record_of("branch")["config"])
    assert cfg.lr == lr_by_law(cfg.law_here, cfg)["lr"] and cfg.law_here.a == 2.0


# -- One step ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, dict(MOE, router_aux_weight=0.5)])
def test_training_is_a_dumb_loop(shape, corpus_path):
    """AdamW and muP by hand, in double precision, with clipped gradients.

    The loop reads whole batches, and train.py micro-batches, on which the auxiliary loss
    depends. We do not log it.
    """
    changed = dict(
        schedule="wsd", lr=0.01, total_tokens=8 * STEP, warmup_tokens=2 * STEP,
        decay_share=3 / 8, grad_clip=0.3, weight_decay=0.4, adam_eps=1e-3,
        micro_batch_size=4, data=str(corpus_path),
    )  # fmt: skip
    cfg = config.make_config(**SMALL | changed | shape)
    mixture = data.load_mixture(cfg)
    state = train.build(cfg)
    state.model.double()
    by_hand = copy.deepcopy(state.model)
    weights = dict(by_hand.named_parameters())
    mean = {name: torch.zeros_like(w) for name, w in weights.items()}
    square = {name: torch.zeros_like(w) for name, w in weights.items()}
    n_clipped = 0
    for t, step in enumerate(train.training_steps(cfg, state, mixture), start=1):
        batch = mixture.draw(np.arange(8 * (t - 1), 8 * t), 32, cfg.data_seed)
        inputs, targets = map(torch.from_numpy, batch)
        loss, _ = by_hand(inputs, targets)
        objective = loss
        for half in (slice(4), slice(4, 8)):
            _, routing = by_hand(inputs[half], targets[half])
            if routing:
                objective = objective + 0.5 * routing.aux_loss.sum() / 2
        gradients = torch.autograd.grad(objective, list(weights.values()))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        lr = make_schedule(cfg)(STEP * (t - 0.5))
        assert (step.lr, step.loss.item()) == (lr, pytest.approx(loss.item(), rel=1e-9))
        assert step.grad_norm.item() == pytest.approx(norm, rel=1e-9)
        n_clipped += norm > 0.3
        for (name, w), g in zip(weights.items(), gradients):
            g = g * min(1, 0.3 / (norm + 1e-6))
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.95 * square[name] + 0.05 * g**2
            size = (square[name] / (1 - 0.95**t)).sqrt() + 1e-3
            move = mean[name] / (1 - 0.9**t) / size
            is_gain = w.dim() == 1
            if not is_gain:
                move = move + 0.4 * w
            is_hidden = not is_gain and "embed" not in name
            w.data -= lr / (2 if is_hidden else 1) * move  # m_width is 2
    assert t == 8 and n_clipped >= 4
    for name, w in state.model.named_parameters():
        torch.testing.assert_close(w, weights[name], rtol=1e-8, atol=1e-10)


def test_a_compiled_run_has_one_program_for_all_blocks_and_one_for_the_loss(
    corpus_path, monkeypatch
):
    """Neither validation nor the sample compiles more. The programs run eagerly here."""
    fields = dict(data=corpus_path, n_layer=2, total_tokens=2 * STEP, warmup_tokens=0)
    programs = []

    def keep(graph, inputs, **_):
        programs.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", keep)
    losses = {}
    for out in ("no-compile", "compile"):
        assert train.main([*argv(out=out, **fields), f"--{out}"]) == 0
        losses[out] = [line["loss"] for line in metrics(out)]
    assert len(programs) == 2
    assert losses["compile"] == pytest.approx(losses["no-compile"], rel=1e-5)


# -- Mistakes of a user ------------------------------------------------------------------


@pytest.mark.parametrize("typed, word", [
    ("--lrr 1", "--lrr"),
    ("--lr 0.1", "--lr 0.1"),  # Power has none
    ("--device cuda:99", "--device cuda:99"),
    ("--data nowhere", "nowhere"),
    ("--data corpus --vocab_size 100", "--vocab_size 100"),
    ("--data corpus --micro_batch_size 3", "--micro_batch_size 3"),
    ("--minutes 1 --total_tokens 1M", "--minutes"),
    ("--law file", "--law file"),
    ("--data corpus --out .", "--out ."),
    ("--resume", "--out"),
])  # fmt: skip
def test_a_mistake_is_one_line(typed, word, corpus_path, tmp_path, one_line):
    (tmp_path / "corpus").symlink_to(corpus_path)
    (tmp_path / "file").write_text("no law, and in the way of --out")
    before = files_in(tmp_path)
    assert word in one_line(train.main, typed.split())
    assert files_in(tmp_path) == before
