"""Our questions of public runs, asked of made-up ones whose answers are known."""

import csv
import json
import math
from itertools import product

import numpy as np
import pytest

import public
from tools.stats import over, show


LENGTHS = {128: (6e9, 30e9, 120e9), 256: (6e9, 30e9, 100e9, 120e9)}  # by batch size
BENDS = {128: 0.01, 256: 0.03}


def write_openeurollm(folder) -> None:
    """A table as OpenEuroLLM writes it, of two series with the same law.

    Their loss is 2 + bend log2(lr / best)^2, with best = 0.007 (T / 6e9)^-0.3.
    """
    rows = []
    for batch, lengths in LENGTHS.items():
        for T, k in product(lengths, range(8)):
            row = dict(N=124455168, D=T, lr=0.0004 * 2**k, gbsz=batch, beta2=0.99)
            row["seed"] = 2345 if k == 5 else 1234  # they are pooled
            best = 0.007 * (T / 6e9) ** -0.3
            row["loss"] = 2 + BENDS[batch] * math.log2(row["lr"] / best) ** 2
            rows.append(row)
    file = folder / "data/loss_all_exps_post_annealing.csv"
    file.parent.mkdir(parents=True)
    with open(file, "w", newline="") as text:
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_schaipp(folder) -> None:
    """Logs as Schaipp et al. write them. b is the share of the decay - 0.5."""

    def write(name: str, loss: float, **config):
        log = {"config": config, "summary": {"final-val/loss": loss}}
        (folder / "data" / name).write_text(json.dumps(log))

    (folder / "data/horizon_transfer").mkdir(parents=True)
    for share in (0.2, 0.6):
        for T in (15_000, 50_000):
            for lr in (0.0005, 0.001, 0.002):
                best = 0.001 * (T / 25_000) ** (share - 0.5)
                loss = 3 + 0.01 * math.log2(lr / best) ** 2
                name = f"ann124-{share}_lr{lr}_decay_linear_{share}_iter{T}.json"
                write(name, loss, wsd_fract_decay=share, iterations=T, lr=lr)
    for scheduler, loss in (("wsd", 2.9), ("wsd_twostage", 2.8)):
        config = dict(n_layer=24, iterations=100_000, wsd_fract_decay=0.2)
        name = f"horizon_transfer/extend-50k_{scheduler}.json"
        write(name, loss, scheduler=scheduler, **config)


def test_the_tables_have_what_the_laws_say(tmp_path, monkeypatch):
    monkeypatch.setattr(public, "COMMITTED", tmp_path / "public.json")
    for name, write in (("openeurollm", write_openeurollm), ("schaipp", write_schaipp)):
        write(tmp_path / name)
    command = f"--openeurollm {tmp_path}/openeurollm --schaipp {tmp_path}/schaipp"
    assert public.main(command.split()) == 0
    rows = json.loads((tmp_path / "public.json").read_text())

    # ratio^-0.3 is best. Held is 0.3 log2(ratio) octaves above it. Means are over series
    ratios = [([20], [100 / 6, 20]), ([5], [5]), ([4], [4])]  # of the pairs of a series
    for (_, n_series, *cells), of_series in zip(rows["at scale"], ratios, strict=True):
        assert n_series == "2"
        expected = []
        for bend, some in zip(BENDS.values(), of_series):
            octaves = np.log2(some)[:, None] * [0.3, 0.3, -0.2] - [0, 1, 0]
            expected.append(bend * np.mean(octaves**2, axis=0))
        for cell, answer in zip(cells, np.transpose(expected)):
            assert cell == show(over(answer), ".4f")
    assert rows["extended"] == [["210M, 2 times", "2.9000", "2.8000", ""]]
    assert rows["public shares"] == [["20%", "-0.30"], ["60%", "0.10"]]


def test_beyond_the_tried_learning_rates_the_nearest_counts():
    valley = public.valley_of([(-1, 0.04), (0, 0.01), (1, 0.0), (2, 0.01)])
    assert valley.bottom == pytest.approx(1)
    found = valley.regret(np.array([-3.0, 0.5, 4.0]))
    assert found == pytest.approx([0.04, 0.0025, 0.01])
