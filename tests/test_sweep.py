"""Sweeps: a branch is the separate run, the rule finds the valley, and nothing is lost or done twice."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import sweep
import train
from test_mistakes import one_line
from test_train import SMALL

ROOT = Path(__file__).parent.parent
COMMON = {k: v for k, v in SMALL.items() if k not in ("n_embd", "n_head", "batch_size", "total_tokens", "lr", "device")}
TINY = dict(common=COMMON, rows=[(dict(n_embd=32, n_head=2), [4, 8], 1)], budgets=[1280, 2560, 5120], guess=0.04)
BUDGETS = [3000, 6000, 12000]  # not whole batches

TIMELESS = {"seconds", "tokens_per_second", "command", "started", "out", "git_commit", "git_dirty"}  # somebody may commit while we test


@pytest.fixture
def tiny(monkeypatch, corpus_path):
    """A scale for tests, and its command line."""
    monkeypatch.setitem(sweep.GRIDS["wsd"], "tiny", TINY)
    return ["wsd", "--scale=tiny", "--out=out", "--workers=1", f"--data={corpus_path}", "--device=cpu"]


def records(folder="out") -> dict:
    """identity -> record without its times and places; fails where a run is there twice."""
    found = [{k: v for k, v in r.items() if k not in TIMELESS} for r in sweep.read_records(Path(folder))]
    assert len({sweep.identity(r) for r in found}) == len(found)
    return {sweep.identity(r): r for r in found}


# -- a trunk and its branches ----------------------------------------------------------------------


def config(corpus_path, **changed) -> train.TrainConfig:
    return train.resolve_device(train.make_config(**COMMON | dict(n_embd=32, n_head=2, batch_size=8, device="cpu", data=str(corpus_path)) | changed))


@pytest.fixture
def final_weights(monkeypatch) -> list[dict]:
    """The weights of every run at its end, in order."""
    seen, real = [], train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda cfg, model, *rest: (seen.append({k: v.clone() for k, v in model.state_dict().items()}), real(cfg, model, *rest))[1])
    return seen


@pytest.mark.parametrize("mixture", [{}, dict(n_expert=4, n_expert_active=2, micro_batch_size=4)], ids=["dense", "mixture"])
@pytest.mark.parametrize("schedule", [dict(schedule="wsd"), dict(schedule="power"), dict(schedule="power", average=True, decay_tokens=300)], ids=["wsd", "power", "average"])
def test_a_branch_is_the_separate_run_bit_by_bit(schedule, mixture, corpus_path, corpus, final_weights, tmp_path, monkeypatch):
    kind = mixture | schedule
    monkeypatch.setattr(train, "sample", lambda *_: "")  # takes most of the time, and is not what we look at
    monkeypatch.setattr(train, "draw_curve", lambda *_: None)
    runs = [config(corpus_path, total_tokens=T, **kind) for T in BUDGETS]
    together = list(sweep.train_trunk(runs, corpus, tmp_path / "trunks" / "a.pt"))
    for cfg in runs:
        (tmp_path / str(cfg.total_tokens)).mkdir()
        record = train.train(cfg, corpus, tmp_path / str(cfg.total_tokens))
        (ours,) = [r for r in together if r["total_tokens"] == cfg.total_tokens]
        assert set(ours) == set(record)
        assert all(ours[name] == value for name, value in record.items() if name not in TIMELESS - {"out", "command"})
    assert len(final_weights) == 6
    for ours, alone in zip(final_weights[:3], final_weights[3:]):
        assert all(torch.equal(w, alone[name]) for name, w in ours.items())


def test_a_stopped_trunk_goes_on(corpus_path, corpus, final_weights, tmp_path):
    """At every step, also in the middle of a branch; and a trunk is made longer later."""
    runs = [config(corpus_path, total_tokens=T, schedule="wsd") for T in BUDGETS]
    whole = list(sweep.train_trunk(runs, corpus, tmp_path / "trunks" / "a.pt"))
    expected, final_weights[:] = final_weights[:], []
    path, done = tmp_path / "trunks" / "b.pt", []
    for patience in (1, 7, 12, 30, 33, 2, 50, 10**9):
        left = [patience]

        def must_stop():
            left[0] -= 1
            return left[0] < 0

        for limit in ([2] if len(done) < 2 and patience < 40 else [3]):  # first the two shorter ones
            done += sweep.train_trunk(runs[len(done) : limit], corpus, path, must_stop) if len(done) < limit else []
    assert [r["val_loss"] for r in done] == [r["val_loss"] for r in whole]
    assert all(torch.equal(w, other[name]) for one, other in zip(expected, final_weights) for name, w in one.items())


def test_a_trunk_that_is_too_far_begins_again(corpus_path, corpus, tmp_path):
    runs = [config(corpus_path, total_tokens=T, schedule="wsd") for T in BUDGETS]
    first = list(sweep.train_trunk(runs, corpus, tmp_path / "trunks" / "a.pt"))
    again = list(sweep.train_trunk(runs[:1], corpus, tmp_path / "trunks" / "a.pt"))  # its record was lost, the trunk is further
    assert again[0]["val_loss"] == first[0]["val_loss"]


@pytest.mark.parametrize("damage", ["other flags", "truncated"])
def test_a_trunk_that_does_not_fit_is_not_used(damage, corpus_path, corpus, tmp_path):
    path, plain = tmp_path / "trunks" / "a.pt", config(corpus_path, total_tokens=6000, schedule="wsd")
    expected = list(sweep.train_trunk([plain], corpus, tmp_path / "trunks" / "b.pt"))
    list(sweep.train_trunk([config(corpus_path, total_tokens=3000, schedule="wsd", weight_decay=0.0 if damage == "other flags" else 0.1)], corpus, path))
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    assert [r["val_loss"] for r in sweep.train_trunk([plain], corpus, path)] == [r["val_loss"] for r in expected]


def test_a_diverged_run_is_a_record(corpus_path, corpus, tmp_path):
    runs = [config(corpus_path, total_tokens=T, schedule="wsd", lr=1e30) for T in BUDGETS]
    together = list(sweep.train_trunk(runs, corpus, tmp_path / "trunks" / "a.pt"))
    assert [(r["diverged"], r["val_loss"]) for r in together] == [(True, None)] * 3 and all(sweep.loss_in(r) == math.inf for r in together)
    assert all(r["tokens"] < 3000 for r in together)  # and nobody waits for the rest


def test_cosines_have_no_trunk_in_common(corpus_path):
    cosines, wsd = ([config(corpus_path, total_tokens=T, schedule=schedule) for T in BUDGETS] for schedule in ("cosine", "wsd"))
    assert [len(runs) for _, runs in sweep.by_trunk(cosines)] == [1, 1, 1] and len({name for name, _ in sweep.by_trunk(cosines)}) == 3
    assert [len(runs) for _, runs in sweep.by_trunk(wsd)] == [3]
    assert sum(sweep.tokens_of(runs) for _, runs in sweep.by_trunk(cosines)) == sum(BUDGETS)
    assert sweep.tokens_of(wsd) == 10800 + sum(BUDGETS) // 10


# -- the rule --------------------------------------------------------------------------------------


def follow(rule, loss) -> dict:
    """Answer a rule until it ends; -> all losses that it saw, {(setting, T): loss}."""
    seen, wanted = {}, next(rule)
    try:
        while True:
            answer = {(j, T): loss(j, T) for j, longest in wanted.items() for T in BUDGETS if T <= longest}
            assert answer.keys() - seen.keys(), "it asks for nothing new"
            seen |= answer
            wanted = rule.send(answer)
    except StopIteration:
        return seen


@pytest.mark.parametrize("seed", range(20))
def test_the_search_ends_with_three_worse_rates_on_each_side(seed):
    rng = random.Random(seed)
    best = {T: rng.uniform(0, 20) for T in BUDGETS}
    noise = {(j, T): rng.gauss(0, 0.01) for j in range(-20, 40) for T in BUDGETS}
    cliff = rng.uniform(1, 6)
    loss = lambda j, T: 0.02 * (j - best[T]) ** 2 + noise[j, T] if j < best[T] + cliff else math.inf  # too high a rate diverges
    seen = follow(sweep.search(lambda T: rng.uniform(0.001, 0.1), BUDGETS), loss)
    for T in BUDGETS:
        tried = {j: value for (j, t), value in seen.items() if t == T}
        lowest = min(tried, key=tried.get)
        assert all(tried[lowest + step] >= tried[lowest] for step in (-3, -2, -1, 1, 2, 3))
        assert abs(lowest - best[T]) < 2.5
    assert len({j for j, _ in seen}) < 60


def test_the_search_gives_up_where_rates_make_no_sense():
    for loss in (lambda j, T: -j, lambda j, T: j, lambda j, T: math.inf):
        rates = [sweep.rate(j) for j, _ in follow(sweep.search(lambda T: 0.01, BUDGETS), loss)]
        assert 1e-6 < min(rates) <= max(rates) < 2


def test_the_papers_rates_are_among_ours():
    assert [sweep.rate(j) for j in range(2, 18, 2)] == [0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.0256]
    assert sweep.rate(3) / sweep.rate(2) == pytest.approx(2**0.5, rel=1e-3)


# -- the whole -------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", sweep.GRIDS)
@pytest.mark.parametrize("scale", sweep.GRIDS["wsd"])
def test_every_grid_makes_sense(experiment, scale):
    columns = sweep.columns_of(experiment, scale, {})
    total = [sweep.plan(column, lambda cfg: None, "cpu") for column in columns]
    names = [name for column in columns for runs in sweep.replay(column, lambda cfg: 0.0).values() for name, _ in sweep.by_trunk(runs)]
    if experiment in ("wsd", "power"):  # `compare` has cosines, without branches, and may want a rate twice; the others have one T
        assert sum(p["tokens"] for p in total) <= 0.6 * sum(p["separate"] for p in total)
        assert len(set(names)) == len(names)  # no two settings share a checkpoint
    for column in columns:
        assert sweep.a_run_of(column).warmup_tokens <= column.budgets[0] / 2
    if experiment == "wsd" and scale == "paper":
        assert sum(p["runs"] for p in total) == 3 * 8 * 6 * 8


def test_the_plan_counts_what_is_trained(tiny, corpus_path, monkeypatch, capsys):
    """The tokens of the dry run against a count of the steps that a sweep along the guess takes."""
    columns, trained = sweep.columns_of("wsd", "tiny", {"data": str(corpus_path)}), []
    monkeypatch.setattr(train, "optimizer_step", lambda cfg, *_: (trained.append(cfg.batch_tokens), 0.0)[1:])
    for column in columns:
        for runs in sweep.replay(column, column.made_up).values():
            stable = lambda cfg: cfg.total_tokens - cfg.decay_tokens
            sweep.advance(runs[-1], None, None, None, None, 0, stable(runs[-1]))
            for cfg in runs:
                sweep.advance(cfg, None, None, None, None, stable(cfg) // cfg.batch_tokens * cfg.batch_tokens, cfg.total_tokens)
    planned = sum(sweep.plan(column, lambda cfg: None, "cpu")["tokens"] for column in columns)
    assert sum(trained) == pytest.approx(planned, rel=0.02)
    assert sweep.main([*tiny, "--dry_run"]) == 0 and not Path("out").exists()
    assert f"{planned:.3g} tokens" in capsys.readouterr().out


@pytest.fixture(scope="module")
def undisturbed(corpus_path, tmp_path_factory):
    """The records of the tiny sweep, made at one go."""
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sweep.GRIDS["wsd"], "tiny", TINY)
        assert sweep.main(["wsd", "--scale=tiny", f"--out={out}", "--workers=1", f"--data={corpus_path}", "--device=cpu"]) == 0
    assert not list((out / "trunks").iterdir())
    return records(out)


def test_a_sweep_makes_the_records_of_train(undisturbed, corpus_path):
    record = random.Random(0).choice([r for r in undisturbed.values() if r["total_tokens"] == 2560])
    typed = {name: record[name] for name in ("schedule", "n_embd", "n_head", "batch_size", "total_tokens", "lr")}
    flags = COMMON | typed | {"data": corpus_path, "device": "cpu", "out": "alone"}
    assert train.main([f"--{name}={value}" for name, value in flags.items()]) == 0
    alone = json.loads(Path("alone/record.json").read_text())
    assert {name: alone[name] for name in record} == record and set(alone) - set(record) == TIMELESS


TINY_COMPARISON = dict(
    common=COMMON, tune=(dict(n_embd=32, n_head=2), 4, 1280), trials=dict(cosine=range(14, 17), wsd=range(13, 16), power=range(2, 5), ours=range(-3, 0)), ours=(-0.25, 0.5),
    rows=[(dict(n_embd=32, n_head=2), [4, 16], 2)], budgets=[1280, 2560], guess=0.02,
)  # fmt: skip


def test_a_comparison(corpus_path, corpus, monkeypatch, capsys):
    """On two shards; each schedule tuned on its own, what follows follows from that."""
    monkeypatch.setitem(sweep.GRIDS["wsd"], "tiny", TINY)
    monkeypatch.setitem(sweep.GRIDS["compare"], "tiny", TINY_COMPARISON)
    argv = ["compare", "--scale=tiny", "--out=out", "--workers=1", f"--data={corpus_path}", "--device=cpu"]
    for shard in ("1/2", "2/2", "1/2", "2/2", "1/2"):  # each goes on where it had to wait for the other
        status = sweep.main([*argv, f"--shard={shard}"])
        if shard == "1/2" and len(records()) < 20:
            assert status == 3 and "wait for some of the other shards'" in capsys.readouterr().out
    assert status == 0
    found = list(records().values())

    tuning, compared = [r for r in found if r["seed"] >= 100], [r for r in found if r["seed"] < 100]
    assert len(tuning) == 4 * 3 * 3 and {r["total_tokens"] for r in tuning} == {1280}
    best = {}
    for kind, knob, of in (
        ("cosine", "lr", dict(schedule="cosine")), ("wsd", "lr", dict(schedule="wsd")),
        ("power", "power_a", dict(schedule="power", power_b=-0.51)), ("ours", "power_a", dict(schedule="power", power_b=-0.25)),
    ):  # fmt: skip
        mean = lambda x: sum(r["val_loss"] for r in trials if r[knob] == x)
        trials = [r for r in tuning if all(r[k] == v for k, v in of.items())]
        assert len(trials) == 9
        best[kind] = min({r[knob] for r in trials}, key=mean)
    runs = lambda **where: [r for r in compared if all(r[k] == v for k, v in where.items())]
    for T in (1280, 2560):
        for batch, factors in ((4, {1}), (16, {1, 2, 4})):
            for seed in (0, 1):
                cell = dict(total_tokens=T, batch_size=batch, seed=seed)
                assert {round(r["lr"] / best["cosine"], 2) for r in runs(schedule="cosine", **cell)} == factors
                assert {round(r["lr"] / best["wsd"], 2) for r in runs(schedule="wsd", **cell)} >= factors
                steps = lambda a: round(2 * math.log2(a))  # of sqrt(2)
                decayed, averaged = ({(r["power_b"], steps(r["power_a"])) for r in runs(schedule="power", average=a, decay_tokens=0 if a else T // 10, **cell)} for a in (False, True))
                half = (batch / 4) ** -0.5  # of Power's own factor, taken back
                assert averaged == {(-0.51, steps(best["power"])), (-0.25, steps(best["ours"] * half))}
                assert decayed == averaged | {(-0.51, steps(best["power"] * half))}
            floor = min(runs(schedule="wsd", total_tokens=T, batch_size=batch, seed=0), key=lambda r: r["val_loss"])
            assert runs(schedule="wsd", total_tokens=T, batch_size=batch, seed=1, lr=floor["lr"])

    # the longest cosine, looked at on its way, is what it had been there
    cosine = runs(schedule="cosine", total_tokens=2560, batch_size=4, seed=0)[0]
    cfg = config(corpus_path, **{k: cosine[k] for k in ("schedule", "lr", "total_tokens", "batch_size")})
    model, optimizer = train.build(cfg)
    assert sweep.advance(cfg, model, optimizer, None, corpus, 0, 1280) == 1280
    assert train.evaluate(cfg, model, corpus, 1280)[1]["val_loss"] == cosine["val_loss_at_1280"]
    assert not any("val_loss_at_1280" in r for r in found if r["schedule"] != "cosine" or r["total_tokens"] == 1280)


def when_there_are(n: int, folder: str, do) -> None:
    """Call do() from another thread as soon as a folder has n records."""

    def watch():
        while len(sweep.read_records(Path(folder))) < n:
            time.sleep(0.02)
        do()

    threading.Thread(target=watch, daemon=True).start()


def test_stopped_and_continued_on_two_shards_and_on_one(undisturbed, tiny, capsys):
    when_there_are(4, "out", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert sweep.main(tiny) == 3
    assert "the same command goes on" in capsys.readouterr().out
    before = records()
    assert 4 <= len(before) < len(undisturbed)
    with open("out/records.jsonl", "a") as file:
        file.write('{"n_embd": 32, "los')  # power cut in the middle of a line
    when_there_are(len(before) + 3, "out", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sweep.main([*tiny, "--shard=1/2"]) == 3
    assert len(records()) >= len(before) + 3
    assert sweep.main([*tiny, "--shard=2/2"]) == 0 and len(records()) < len(undisturbed)
    assert sweep.main(tiny) == 0
    assert records() == undisturbed
    assert sweep.main(tiny) == 0 and records() == undisturbed  # nothing left to do


def test_a_worker_that_dies_is_noticed(undisturbed, tiny):
    """One of two is killed, as by the kernel when memory is short: one line, an end, and the records of the other."""
    code = f"import sys, sweep; sweep.GRIDS['wsd']['tiny'] = {TINY!r}; sys.exit(sweep.main({[*tiny, '--workers=2']!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (Path("out") / "records.jsonl").exists() or not records():
        time.sleep(0.1)
    own = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(pid) for pid in own if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "a worker died" in said and "Traceback" not in said
    for _ in range(100):
        if not Path(f"/proc/{workers[1]}").exists():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the other worker is still there")
    assert sweep.main(tiny) == 0 and records() == undisturbed


@pytest.mark.slow
def test_killed_at_any_moment(undisturbed, tiny, corpus_path):
    """SIGKILL of parent and workers together, twenty times."""
    code = f"import sys, sweep; sweep.GRIDS['wsd']['tiny'] = {TINY!r}; sys.exit(sweep.main({tiny!r}))"
    rng, kills = random.Random(0), 0
    while kills < 20:
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
        try:
            if process.wait(timeout=rng.uniform(3, 9)) == 0:
                assert records() == undisturbed
                (Path("out") / "records.jsonl").unlink()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    assert sweep.main(tiny) == 0
    assert records() == undisturbed


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "experiment"), (["wds"], "wsd"), (["wsd", "--scale", "small"], "quick"), (["wsd", "--workers", "x"], "--workers"), (["wsd", "--workers", "0"], "--workers 0"),
        (["wsd", "--shard", "0/2"], "--shard 0/2"), (["wsd", "--shard", "3/2"], "--shard 3/2"), (["wsd", "--shard", "x"], "--shard x"), (["wsd", "--shard", "9/9", "--data", "CORPUS"], "--shard 9/9"), (["wsd", "--shrad", "1/2"], "did you mean --shard"),
        (["wsd", "--weight_decy", "0"], "did you mean --weight_decay"), (["wsd", "--lr", "0.1"], "--lr"), (["power", "--batch_size", "8"], "--batch_size"),
        (["wsd", "--n_embd=48", "--data", "CORPUS"], "widths 32, 64"), (["wsd", "--n_head=4"], "--n_head"), (["wsd", "--weight_decay", "-1"], "--weight_decay"), (["wsd", "--data", "nowhere"], "--data"), (["wsd", "--device", "cuda:9"], "--device"),
        (["wsd", "--data", "CORPUS", "--tokenizer", "gpt2"], "--tokenizer"), (["wsd", "--data", "CORPUS", "--vocab_size", "9"], "--vocab_size"),
        (["wsd", "--warmup_tokens", "1e6"], "warmup_tokens"), (["wsd", "--out", "/proc/no/sweep", "--data", "CORPUS"], "--out /proc/no"), (["wsd", "--resume"], "--resume"),
        (["wsd", "--decay_data", "CORPUS"], "--decay_data"), (["wsd", "--past_data", "embedded@9"], "--past_data"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(argv, says, corpus_path, tmp_path, capsys):
    assert says in one_line(sweep.main, [str(corpus_path) if word == "CORPUS" else word for word in argv], capsys)
    assert not list(tmp_path.iterdir())


def test_a_sweep_over_a_mixture(corpus_path, documents, tmp_path, monkeypatch):
    """Each of its runs is train.py's with the same --data."""
    train.data.prepare(documents[:300], "bytes", Path("other"))
    data = f"{corpus_path}:0.25,other:0.75"
    monkeypatch.setitem(sweep.GRIDS["wsd"], "tiny", TINY | dict(rows=[(dict(n_embd=32, n_head=2), [8], 1)], budgets=[1280], rates=[12]))
    assert sweep.main(["wsd", "--scale=tiny", "--out=out", "--workers=1", f"--data={data}", "--device=cpu"]) == 0
    (record,) = records().values()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker of a sweep
    try:
        flags = [f"--{'' if v is not False else 'no-'}{k}" + f"={v}" * (v is not False) for k, v in COMMON.items()]
        assert train.main([*flags, "--n_embd=32", "--n_head=2", "--batch_size=8", "--schedule=wsd", f"--lr={record['lr']}", "--total_tokens=1280",
                           f"--data={data}", "--device=cpu", "--out=alone"]) == 0  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    alone = json.loads(Path("alone/record.json").read_text())
    assert {k: alone[k] for k in record if k not in TIMELESS} == {k: v for k, v in record.items() if k not in TIMELESS} | {"threads": 1}


def test_records_of_something_else_are_refused(undisturbed, tiny, documents, capsys):
    Path("out").mkdir()
    text = "".join(json.dumps(r) + "\n" for r in undisturbed.values())
    Path("out/records.jsonl").write_text(text)
    assert "warmup_tokens 1024, and this sweep has 0" in one_line(sweep.main, [*tiny, "--warmup_tokens=0"], capsys)
    assert "schedule wsd" in one_line(sweep.main, ["power", *tiny[1:2], "--scale=quick", *tiny[2:]], capsys)
    train.data.prepare(documents[:200], "bytes", Path("other"))
    assert "fingerprint" in one_line(sweep.main, [*tiny[:-2], "--data=other", "--device=cpu"], capsys)
    assert Path("out/records.jsonl").read_text() == text
