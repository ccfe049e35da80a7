"""Every figure can be read: nothing overlaps, nothing is cut off, no text is tiny or faint."""

import json

import matplotlib.colors
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

import mup
import schedules
import train


def luminance(color) -> float:
    """Relative luminance as the web's accessibility guidelines (WCAG 2) define it."""
    channels = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(color)]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def contrast_on_white(color) -> float:
    return 1.05 / (luminance(color) + 0.05)


def check_layout(fig: Figure) -> None:
    renderer = FigureCanvasAgg(fig).get_renderer()
    fig.draw(renderer)
    texts = [t for t in fig.findobj(Text) if t.get_text().strip() and t.get_visible()]
    ticks = {id(t) for ax in fig.axes for axis in (ax.xaxis, ax.yaxis) for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
             for t in tick.findobj(Text) if not axis.get_view_interval()[0] <= tick.get_loc() <= axis.get_view_interval()[1]}  # fmt: skip
    boxes = [(t, Text.get_window_extent(t, renderer)) for t in texts if id(t) not in ticks]
    for i, (text, box) in enumerate(boxes):
        assert text.get_fontsize() >= 9, f"tiny: {text.get_text()!r}"
        assert contrast_on_white(text.get_color()) >= 4.5, f"faint: {text.get_text()!r}"
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= fig.bbox.x1 + 1 and box.y1 <= fig.bbox.y1 + 1, f"cut off: {text.get_text()!r}"
        for other, other_box in boxes[:i]:
            assert not box.overlaps(other_box), f"{text.get_text()!r} lies on {other.get_text()!r}"
    for ax in fig.axes:
        for line in ax.lines:
            assert contrast_on_white(line.get_color()) >= 3
            if line.get_alpha() in (None, 1):
                path = line.get_transform().transform_path(line.get_path())
                for text in ax.texts:
                    box = Text.get_window_extent(text, renderer).padded(-2)  # an Annotation's own has its arrow in it
                    assert not path.intersects_bbox(box, filled=False), f"a line crosses {text.get_text()!r}"
        assert ax.get_ylabel() and (ax.get_xlabel() or ax.get_shared_x_axes().get_siblings(ax))
    assert fig.get_figwidth() == 5 and fig.dpi == 200


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that are saved while a test runs."""
    saved = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), real(self, *a, **k)))
    return saved


def test_schedules(figures, tmp_path):
    schedules.main(["--out", str(tmp_path / "f.png")])
    check_layout(figures[0])


def test_coordinate_check(figures, tmp_path):
    mup.main(["--out", str(tmp_path / "f.png")])
    check_layout(figures[0])


@pytest.mark.parametrize("schedule", [*schedules.SCHEDULES, "power, mixture", "power, averaged"])
def test_curve(figures, tmp_path, schedule):
    lines = [dict(tokens=i * 10**5, loss=5 - i / 25, lr=0.01) for i in range(1, 81)] + [dict(tokens=i * 10**6, val_loss=5 - i / 2.5, average_val_loss=4.8 - i / 2.5) for i in range(1, 9)]
    average = "averaged" in schedule
    schedule, n_expert = schedule.split(",")[0], 8 if "mixture" in schedule else 0
    if n_expert:
        for i, line in enumerate(lines[:80], 1):
            line |= dict(max_load=[1 + 2 / i, 1.3, 1.2 + 1 / i, 1.1], aux_loss=1.2 + 1 / i, router_entropy=1.5)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train.draw_curve(tmp_path, dict(schedule=schedule, preset="laptop", diverged=False, val_loss=1.234567, n_expert=n_expert, average=average))
    check_layout(figures[0])
