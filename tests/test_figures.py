"""Every figure can be read: nothing overlaps, nothing is cut off, no text is tiny or faint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

import schedules
from tools import figures as drawing

ROOT = Path(__file__).parent.parent


def contrast_on_white(color) -> float:
    """As the web's accessibility guidelines (WCAG 2) define it, from relative luminance."""
    rgb = np.array(matplotlib.colors.to_rgb(color))
    linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return 1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05)


def text_boxes(fig: Figure, renderer) -> list[tuple]:
    """(text, its box in pixels) of all texts that are shown; ticks outside the axis are not."""
    hidden = set()
    for axis in (axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                hidden |= set(map(id, tick.findobj(Text)))
    shown = [t for t in fig.findobj(Text) if t.get_text().strip() and t.get_visible()]
    # an Annotation's own extent has its arrow in it
    return [
        (t, Text.get_window_extent(t, renderer)) for t in shown if id(t) not in hidden
    ]


def check_layout(fig: Figure) -> None:
    renderer = FigureCanvasAgg(fig).get_renderer()
    fig.draw(renderer)
    assert fig.get_figwidth() == 5 and fig.dpi == 200
    boxes = text_boxes(fig, renderer)
    for i, (text, box) in enumerate(boxes):
        assert text.get_fontsize() >= 9, f"tiny: {text.get_text()!r}"
        assert contrast_on_white(text.get_color()) >= 4.5, f"faint: {text.get_text()!r}"
        over = max(-box.x0, -box.y0, box.x1 - fig.bbox.x1, box.y1 - fig.bbox.y1)
        assert over <= 1, f"cut off: {text.get_text()!r}"
        for other, other_box in boxes[:i]:
            assert not box.overlaps(other_box), (
                f"{text.get_text()!r} on {other.get_text()!r}"
            )
    for ax in fig.axes:
        assert len(ax.get_yticks()) > 1, "one tick is no scale"
        assert ax.get_ylabel() and (
            ax.get_xlabel() or ax.get_shared_x_axes().get_siblings(ax)
        )
        for line in (line for line in ax.lines if line.get_alpha() != 0):
            assert contrast_on_white(line.get_color()) >= 3
            path = line.get_transform().transform_path(line.get_path())
            for text in ax.texts if line.get_alpha() in (None, 1) else []:
                box = Text.get_window_extent(text, renderer).padded(-2)
                crosses = path.intersects_bbox(box, filled=False)
                assert not crosses, f"a line crosses {text.get_text()!r}"


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved while a test runs, in a list. All of them can be read."""
    saved, save = [], Figure.savefig

    def keep(fig, *args, **how):
        saved.append(fig)
        save(fig, *args, **how)

    monkeypatch.setattr(Figure, "savefig", keep)
    yield saved
    assert saved
    for fig in saved:
        check_layout(fig)


def test_schedules_are_printed_and_drawn(figures, capsys):
    assert schedules.main([]) == 0 and Path("assets/schedules.png").exists()
    assert "32.00B  0.000258  0.000000  0.000000" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", [*schedules.SCHEDULES, "a fork's own"])
def test_curve(figures, tmp_path, schedule):
    lines = []
    for i in range(1, 81):
        experts = dict(max_load=[1 + 2 / i, 1.3], aux_loss=1 + 1 / i, router_entropy=1.5)
        lines.append(dict(tokens=i * 10**5, loss=5 - i / 25, lr=0.01) | experts)
    for i in range(1, 9):
        lines.append(
            dict(tokens=i * 10**6, val_loss=5 - i / 2.5, average_val_loss=4.8 - i / 2.5)
        )
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"tokens": 1'
    (tmp_path / "metrics.jsonl").write_text(text)
    config = dict(schedule=schedule, preset="laptop", average=schedule == "wsd")
    config |= dict(n_expert=8 * (schedule == "power"))
    results = dict(diverged=False, loss=1.234567, val_loss=1.234567)
    drawing.draw_curve(tmp_path, dict(config=config, results=results, origin={}))
    assert len(figures[0].axes[0].lines[0].get_xdata()) == 80


def test_a_narrow_axis_has_two_labels_and_equal_labels_may_share_an_x(figures, tmp_path):
    point = lambda x: (x, -7.5, -7.6, -7.4, -7.5)
    groups = {"T = 100k": [point(1), point(1)], "T = 200k": [point(1), point(2)]}
    colors = drawing.shades(groups, "tokens")
    drawing.draw_points(tmp_path / "a.png", groups, colors, title="t", xlabel="x")


def test_of_lines_that_a_resumed_run_repeats_the_last_counts(tmp_path):
    lines = [(1, "loss", 5.0), (2, "loss", 4.0), (2, "val_loss", 4.1), (3, "loss", 9.0)]
    lines.append((2, "loss", 4.5))
    text = "".join(
        json.dumps({"tokens": n, name: loss}) + "\n" for n, name, loss in lines
    )
    (tmp_path / "metrics.jsonl").write_bytes(text.encode() + b"\xff\n")
    found = [(m["tokens"], *list(m.items())[1]) for m in drawing.read_metrics(tmp_path)]
    assert found == [lines[0], lines[4], lines[2], lines[3]]


INLINE = "module://matplotlib_inline.backend_inline"
TRAIN = "train.py --total_tokens 2k --warmup_tokens 0 --n_layer 1 --n_embd 16 --n_head 2 --out run"


@pytest.mark.parametrize(
    "command, picture, backend",
    [
        (f"{TRAIN} --seq_len 32 --batch_size 2 --dtype float32", "run/curve.png", INLINE),
        ("schedules.py", "assets/schedules.png", "nonsense"),
        ("fit.py sweep", "sweep/law.png", INLINE),
    ],
)
def test_programs_draw_whatever_backend_a_notebook_sets(
    command, picture, backend, tmp_path, corpus_path
):
    """A notebook sets one for every program that it starts."""
    from test_fit import write, wsd_records  # which imports this file

    program, *argv = command.split()
    if program == "train.py":
        argv.append(f"--data={corpus_path}")
    if program == "fit.py":
        write(wsd_records(widths=[32]), tmp_path / "sweep")
    done = subprocess.run(
        [sys.executable, ROOT / program, *argv],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": backend},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"
    assert "no curve.png" not in done.stdout
