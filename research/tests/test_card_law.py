"""The answers of card_law.py, for losses of a made-up law."""

import json
import math

import card_law
import pytest


def made_up_rows(b: float) -> list[dict]:
    rows = []
    for decay, slope in ((0.1, b), (0.0, 0.0)):
        for T in card_law.T:
            best = 2**-7.3 * (T / card_law.T[0]) ** slope
            for lr in card_law.LRS:
                if lr == card_law.LRS[0] and T > card_law.T[1]:
                    continue  # it diverged before
                loss = 1.2 + 0.05 * math.log2(lr / best) ** 2 + 1e6 / T
                if lr == card_law.LRS[0] and T == card_law.T[1]:
                    loss = None
                row = dict(weight_decay=decay, lr=lr, T=T)
                rows.append(row | dict(line="wsd", loss=loss))
                rows.append(row | dict(line="constant, averaged", loss=loss and loss + 1))
    return rows


def test_it_finds_a_made_up_law_and_counts_only_whole_lengths(tmp_path, capsys):
    rows = made_up_rows(-0.4)
    last = card_law.T[-1]
    a, b = card_law.law(rows, 0.1, last)
    assert b == pytest.approx(-0.4) and a * last**b == pytest.approx(2**-7.3 * 16**-0.4)
    assert card_law.law(rows, 0.0, last)[1] == pytest.approx(0.0, abs=1e-9)
    jobs = card_law.jobs_of_part_2(rows)
    assert [job.line for job in jobs] == 6 * ["linear to 0"] + ["Power (fitted)"]
    power = card_law.train.make_config(
        **card_law.FIELDS | jobs[-1].fields, total_tokens=last
    )
    schedule = card_law.train.make_schedule(power)
    assert schedule(last // 2) == pytest.approx(2**-7.3 * 8**-0.4)

    lines = [json.dumps(row) for row in rows if row["T"] < last or row["lr"] < 0.01]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    assert card_law.lengths(card_law.read(tmp_path)) == card_law.T[:-1]
    card_law.show(tmp_path)
    out = capsys.readouterr().out
    assert "b = -0.400" in out and ("b = 0.000" in out or "b = -0.000" in out)
