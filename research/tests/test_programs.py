"""Do the programs that draw and compare run on the records of a sweep, and on ours?"""

from pathlib import Path

import pytest

from test_figures import figures  # noqa: F401  (checks the layout of all figures)
from test_fit import write
from test_grids import compare_loss, made_up, off
from test_mistakes import one_line

import against
import anytime
import curves
import exponents
import fit
import policies

RESULTS = Path(__file__).parents[1] / "results"


def test_the_figures_of_the_readme(figures, tmp_path):  # noqa: F811
    curves.draw_race(tmp_path / "curves.png")
    curves.draw_decay(tmp_path / "decay.png")
    exponents.draw(tmp_path / "exponents.png")
    policies.draw(tmp_path / "policies.png")


def test_settings_with_one_T_and_one_batch_size_have_no_law(figures, capsys):  # noqa: F811
    records = made_up("transfer", "quick", lambda cfg: 2 + 0.03 * off(cfg, "quick") ** 2)
    scales = ",".join({str(r["attention_multiplier"]) for r in records})
    assert against.main([f"attention_multiplier={scales}", "transfer"]) == 0
    assert "nan" not in capsys.readouterr().out


def test_one_power_run_is_drawn_beside_a_cosine_that_is_cut_short(figures, capsys):  # noqa: F811
    """The records have its losses at shorter T, which sweep.py no longer notes."""
    records = made_up("compare", "quick", lambda cfg: compare_loss(cfg, "quick"))
    last = [r["schedule"] == "cosine" and r["total_tokens"] == 160_000 for r in records]
    some = [r for r, is_last in zip(records, last) if not is_last]
    for folder in (Path("compare"), write(some, Path("unfinished"))):
        assert "longest cosines" in one_line(anytime.main, [str(folder)], capsys)
    for r, is_last in zip(records, last):
        if is_last:
            r |= {f"val_loss_at_{T}": 3.0 for T in (20_000, 40_000, 80_000)}
    assert anytime.main([str(write(records, Path("noted")))]) == 0


@pytest.mark.parametrize(
    "law", RESULTS.rglob("law.json"), ids=lambda law: law.parent.name
)
def test_a_committed_law_predicts(law, capsys):
    argv = ["--predict", "--total_tokens=5e6", "--batch_size=4", "--seq_len=128"]
    assert fit.main([*argv, f"--law={law}"]) == 0
    assert 0.001 < float(capsys.readouterr().out) < 0.01
