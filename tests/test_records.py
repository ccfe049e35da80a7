"""Records: what a folder's lines share, which runs fit together, and what is refused."""

import json
import os
from pathlib import Path

import pytest

import records
from records import read_records, read_rows
from config import saved_config
from test_mistakes import one_line
from train import make_config


def record(loss: float | None = 2.0, **fields) -> dict:
    """A record as train.py writes it, of the config with these fields."""
    cfg = make_config(**dict(schedule="wsd", total_tokens=10**6, lr=0.01) | fields)
    results = {"loss": loss, "val_loss": loss, "diverged": loss is None}
    return {"config": vars(cfg), "results": results, "origin": {"fingerprint": "0"}}


def write(some: list[dict], folder: str = "runs") -> Path:
    Path(folder).mkdir()
    text = "".join(json.dumps(line) + "\n" for line in some)
    Path(folder, "records.jsonl").write_text(text)
    return Path(folder)


def test_a_line_has_what_settings_json_says_unless_it_says_otherwise():
    whole = [record(lr=0.01), record(lr=0.02), record(lr=0.02, seed=1)]
    lines = [
        {"config": {"lr": 0.01}, "results": {"loss": 2.0}},
        {"results": {"loss": 2.0}},
        {"config": {"seed": 1}, "results": {"loss": 2.0}, "origin": {}},
    ]
    folder = write(lines)
    shared = record(lr=0.02)
    del shared["results"]["loss"]
    (folder / "settings.json").write_text(json.dumps(shared))
    assert read_records(folder) == whole


def test_a_record_that_a_sweep_moves_while_we_read_counts_once():
    folder = write([record(seed=0), record(seed=1)])
    run = folder / "runs/trunk/1"
    run.mkdir(parents=True)
    (run / "record.json").write_text(json.dumps(record(seed=1)))  # in records.jsonl, too
    gone = folder / "runs/trunk/2"
    gone.mkdir()
    (gone / "record.json").symlink_to("moved")  # listed, but not there any more
    assert sorted(r["config"]["seed"] for r in read_records(folder)) == [0, 1]


def test_the_loss_that_counts_is_infinite_if_the_run_diverged():
    averaged = record(average=True, decay_tokens=0, lr=0.02)
    averaged["results"] |= {"loss": 1.5, "val_loss": 2.5}
    rows = read_rows([write([record(lr=0.04, loss=None), averaged, record()])], [])[:1]
    assert [row["loss"] for row in rows] == [float("inf")]
    assert records.row(averaged)["loss"] == 1.5


@pytest.mark.parametrize("change, says", [
    (lambda r: r["config"].update(fixed_norm="hidden"), "different fixed_norm"),
    (lambda r: r["config"].pop("beta2"), "different beta2"),
    (lambda r: r["config"].update(weight_decay=0.2), "different weight_decay"),
    (lambda r: r["origin"].update(fingerprint="1"), "different fingerprint"),
    (lambda r: r["config"].update(decay_share=None, decay_tokens=7), "decay_tokens"),
])  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_runs_that_differ_in_a_setting_or_lack_it_are_not_mixed(change, says, first):
    one, other = record(), record(lr=0.02)
    change(other)
    with pytest.raises(ValueError, match=says):
        read_rows([write([other, one] if first else [one, other])])


def test_settings_that_do_not_change_a_run_may_differ():
    some = [record(lr=0.01), record(lr=0.02, log_every=7, lr_max=0.5, device="cpu")]
    assert len(read_rows([write(some)])) == 2


WRONG = [
    ({"seed": None}, {}, "seed null"), ({"decay_tokens": None}, {}, "decay_tokens null"),
    ({"lr": float("inf")}, {}, "lr inf"), ({"batch_size": float("inf")}, {}, "batch_size inf"),
    ({"lr": "high"}, {}, "lr 'high'"),
    ({}, {"loss": "2"}, "loss '2'"), ({}, {"loss": None}, "loss None"),
]  # fmt: skip


@pytest.mark.parametrize("config, results, says", WRONG)
def test_an_odd_value_is_one_line(config, results, says, capsys):
    wrong = record(lr=0.02)
    wrong["config"] |= config
    wrong["results"] |= results
    folder = write([record(), wrong])
    assert says in one_line(records.main, [str(folder)], capsys)


@pytest.mark.parametrize("line, says", [
    ('{"lr": 1' + "0" * 5000 + "}", "line 1"), ("5", "not a record"),
    ('{"config": 5}', "not a record"),
    ('{"config": {"lr": [1]}}', "lr [1]"),
    ('{"config": {"lr": 1, "total_tokens": 9, "batch_size": 1, "seq_len": 9}}', "no loss"),
])  # fmt: skip
def test_a_line_that_is_no_record_is_one_line(line, says, capsys):
    folder = write([])
    (folder / "records.jsonl").write_text(line + "\n")
    assert says in one_line(records.main, [str(folder)], capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(capsys):
    """Its records would be missing without a word."""
    write([record()], "runs/one")
    folder = write([record(seed=1)], "runs/two")
    folder.chmod(0)
    try:
        says = one_line(records.main, ["runs"], capsys)
    finally:
        folder.chmod(0o700)
    assert "runs/two: cannot be read" in says


def test_the_table_shows_the_settings_in_which_runs_differ(capsys):
    some = [record(), record(weight_decay=0.3), record(decay_share=0.5)]
    some[2]["config"]["fixed_norm"] = "hidden"
    assert records.main([str(write(some))]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    for name in ("weight_decay", "decay_share", "fixed_norm"):
        assert name in head
    assert "beta2" not in head and "decay_tokens" not in head
    assert len(set(lines)) == 3 and "0.3" in lines[1] and "hidden" in lines[2]


# -- A saved config ----------------------------------------------------------------------


def test_a_saved_config_comes_back_as_it_was():
    for fields in ({}, {"decay_tokens": 7}, {"decay_share": 1.0}, {"schedule": "cosine"}):
        cfg = make_config(**fields)
        assert saved_config(json.loads(json.dumps(vars(cfg))), "here") == cfg


def test_the_decay_is_a_tenth_unless_one_of_its_fields_says_more():
    total = dict(total_tokens=10**6, warmup_tokens=10**5)
    for fields, share, tokens in (
        ({}, 0.1, 10**5), ({"decay_share": None, "decay_tokens": None}, 0.1, 10**5),
        ({"decay_share": 0.25}, 0.25, 250_000), ({"decay_tokens": 7}, None, 7),
        ({"decay_share": 1.0}, 1.0, 900_000),  # all after the warmup
        ({"schedule": "cosine", "decay_share": 0.25}, 0.25, 0),
    ):  # fmt: skip
        cfg = make_config(**total | fields)
        assert (cfg.decay_share, cfg.decay_tokens) == (share, tokens)
    cfg = make_config(preset="1B-moe", decay_share=0.5)  # it has decay_tokens
    assert cfg.decay_tokens == cfg.total_tokens // 2


@pytest.mark.parametrize("change, says", [
    ({"fixed_norm": "hidden"}, "here: this version has no setting fixed_norm"),
    ({"beta2": ...}, "here: made by an older version, without beta2"),
    ({"preset": "mine"}, "--preset mine"), ({"seed": None}, "--seed None: must be of type int"),
    ({"weight_decay": "0.1"}, "--weight_decay '0.1': must be of type float"),
    ({"decay_share": 0.2}, "give only one"),
])  # fmt: skip
def test_a_config_of_another_version_is_refused(change, says):
    fields = vars(make_config()) | change
    kept = {name: value for name, value in fields.items() if value is not ...}
    with pytest.raises(ValueError, match=says):
        saved_config(kept, "here")
