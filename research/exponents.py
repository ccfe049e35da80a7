"""The exponent of T in the best learning rate: what it depends on. See research/why.md.

    python research/exponents.py

Draws a figure of README.md, from research/results/bend-laptop and research/results/why-laptop.
"""

import sys
from operator import attrgetter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fit
from policies import b_of
from records import read_rows
from tools import flags
from tools.figures import figure

OURS = "black"
THEIRS = "#a32020"


def by_question() -> dict:
    """{question: (the exponent, that of a paper, its name)}, at width 32."""
    only = ["warmup_tokens=80000", "n_embd=32"]
    cells = fit.fitted_cells(read_rows([ROOT / "research/results/bend-laptop"], only))
    fixed = fit.apply(attrgetter("b"), fit.jackknife(cells, fit.fit_law))
    at_best = fit.reading(cells, fit.step_law_b, 1)
    divided = fit.reading(cells, fit.paper_b, 3)
    return {
        "at a fixed\nbatch size": (fixed, -0.32, "Bjorck et al."),
        "at the best\nbatch size": (at_best, 0.31, "Step Law"),
        "divided by the\nbatch size": (divided, -0.51, "Power Scheduler"),
    }


def by_policy() -> dict:
    """{weight decay or norm: (the exponent, ...)}, at a fixed batch size."""
    return {
        "weight decay 0": (b_of("weight decay 0"),),
        "weight decay ∝ 1/n": (b_of("∝ 1/n, memory 1"),),
        "weight decay 0.1": (b_of("weight decay 0.1"),),
        "weight decay 0.3": (b_of("weight decay 0.3"),),
        "norms fixed": (b_of("all norms fixed"), -0.32, "HyperP"),
    }


def draw_rows(ax, rows: dict) -> None:
    """A row for every exponent, from the top: a dot with its interval, a cross for a paper."""
    for y, (exponent, *paper) in enumerate(rows.values()):
        ax.hlines(y, *fit.interval(exponent), color=OURS)
        ax.plot(exponent.answer, y, "o", color=OURS)
        if paper:
            value, name = paper
            ax.plot(value, y, "X", color=THEIRS, markersize=7)
            away_from_0 = "right" if value < 0 else "left"
            ax.text(value, y - 0.22, name, color=THEIRS, ha=away_from_0)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.6)
    ax.axvline(0, color="black", linewidth=0.6)


def draw(path: Path) -> None:
    with figure(path, 5.2, 2, sharex=True, height_ratios=(1, 1.4)) as (top, bottom):
        draw_rows(top, by_question())
        draw_rows(bottom, by_policy())
        ours = by_question()["at a fixed\nbatch size"][0].answer
        top.text(ours, 0.42, "ours", color=OURS, ha="center")
        top.margins(x=0.12)
        top.set_title("Same runs, three questions")
        top.set_ylabel("best learning rate")
        bottom.set_title("Fixed batch size, five policies")
        for y, words in ((0.5, "weights grow"), (3, "weights do\nnot grow")):
            bottom.text(1.3, y, words, ha="right", va="center")
        bottom.set(xlabel="exponent of T in the best learning rate", ylabel="policy")


def draw_all() -> None:
    draw(ROOT / "assets/exponents.png")


def main(argv: list[str] | None = None) -> int:
    flags.program_parser("exponents.py", __doc__).parse_args(argv)
    draw_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
