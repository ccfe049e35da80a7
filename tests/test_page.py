"""The page to drag, in a headless Chromium, against fit.py, schedules.py and the records."""

import csv
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from urllib.parse import quote

import numpy as np
import pytest

import fit
import page
import schedules
import train
from tools import figures

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
INDEX = page.ROOT / "docs/index.html"
BEND = ["warmup_tokens=80000", "n_embd=32"]  # the runs of steps 2 and 4
SETTLE = "new Promise((done) => setTimeout(done, {}))"


class Browser:
    """A Chromium with one pipe for commands and another for answers."""

    def __init__(self, commands: int, answers: int):
        self.commands = commands
        self.answers = os.fdopen(answers, "rb")
        self.number = 0
        self.session: dict = {}

    def receive(self) -> dict:
        """The next message. Messages end with a zero byte."""
        message = b""
        while (byte := self.answers.read(1)) not in (b"\0", b""):
            message += byte
        return json.loads(message)

    def do(self, method: str, **params) -> dict:
        self.number += 1
        call = {"id": self.number, "method": method, "params": params} | self.session
        os.write(self.commands, json.dumps(call).encode() + b"\0")
        while (message := self.receive()).get("id") != self.number:
            self.seen.append(message["method"])
        return message["result"]

    def open(self, url: str, width: int = 1000, height: int = 740) -> None:
        self.seen = []
        if self.session:
            # a new address after # alone would not load the page again
            self.do("Page.navigate", url="about:blank")
        else:
            tab = self.do("Target.createTarget", url="about:blank")
            self.session = self.do("Target.attachToTarget", flatten=True, **tab)
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.do("Emulation.setDeviceMetricsOverride", mobile=width < 500, **size)
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.do("Emulation.setEmulatedMedia", features=[still])
        self.do("Runtime.enable")
        self.do("Log.enable")
        self.do("Page.navigate", url=url)
        while self.js("document.readyState") != "complete":
            pass

    def show(self, view: str) -> None:
        """Another view of the open page, faster than to open it again."""
        shown = "new Promise((done) => addEventListener('hashchange', done))"
        self.js(f"location.hash = '{view}'; {shown}", awaitPromise=True)

    def js(self, code: str, **more):
        answer = self.do("Runtime.evaluate", expression=code, returnByValue=True, **more)
        assert "exceptionDetails" not in answer, (code, answer)
        return answer["result"].get("value")

    def wait(self, milliseconds: int) -> None:
        self.js(SETTLE.format(milliseconds), awaitPromise=True)

    def press(self, element: str, **key) -> None:
        self.js(f"{element}.focus()")
        self.do("Input.dispatchKeyEvent", type="keyDown", **key)
        self.do("Input.dispatchKeyEvent", type="keyUp", **key)

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1}
        self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=1, **button)

    def choose(self, path) -> None:
        """Choose a file in step 4."""
        root = self.do("DOM.getDocument")["root"]["nodeId"]
        node = self.do("DOM.querySelector", nodeId=root, selector="#file")
        self.do("DOM.setFileInputFiles", files=[str(path)], **node)
        self.wait(300)

    def has_no_errors(self) -> bool:
        return not {"Runtime.exceptionThrown", "Log.entryAdded"} & set(self.seen)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no Chromium; install chromium or google-chrome (docs/extend.md)")
    read, commands = os.pipe()
    answers, write = os.pipe()
    flags = "--headless --no-sandbox --remote-debugging-pipe --user-data-dir=profile"
    # Chromium reads commands from file 3 and writes answers to file 4
    script = f"exec {CHROMIUM} {flags} 3<&{read} 4>&{write} 2>&-"
    folder = tmp_path_factory.mktemp("browser")
    command = ["bash", "-c", script]
    with subprocess.Popen(command, cwd=folder, pass_fds=(read, write)) as process:
        os.close(read)
        os.close(write)
        yield Browser(commands, answers)
        process.terminate()


@pytest.fixture(scope="module")
def data():
    return page.content()


# -- The file ----------------------------------------------------------------------------


def test_the_program_builds_the_committed_page_which_loads_nothing(data):
    text = INDEX.read_bytes()
    assert text == page.page(data).encode()
    assert len(text) < 300_000
    links = text.replace(b'href="https://arxiv.org/abs/2408.13359"', b"")
    for word in (b"src=", b"url(", b"<link", b"http", b"fetch("):
        assert word not in links, word


def test_colors_are_those_of_the_figures(browser):
    browser.open(INDEX.as_uri())
    style = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
    for name, color in figures.COLORS.items():
        assert browser.js(style.format(name)) == color
    assert browser.js(style.format("tokens-low")) == figures.HUES["tokens"][0]


IMAGE = "<img src=x onerror=document.title='ran'>"
MARKUP = f'"</script>{IMAGE}\u2028<!--<script>'
TITLE = "One run, one handle"


@pytest.fixture(scope="module")
def hostile(data, tmp_path_factory):
    """A page whose data try to run code."""
    text = json.dumps(data).replace("width 32", f"width 32{MARKUP}".replace('"', '\\"'))
    bad = json.loads(text)
    for policy in bad["policies"]:
        policy["name"] += MARKUP
    built = tmp_path_factory.mktemp("hostile") / "index.html"
    built.write_text(page.page(bad), encoding="utf-8")
    return built


def test_no_markup_from_the_data_reaches_the_file(hostile):
    text = hostile.read_text(encoding="utf-8")
    own = INDEX.read_text(encoding="utf-8")
    for markup in ("<img", "<!--", "<script", "</script", "\u2028"):
        assert text.count(markup) == own.count(markup), markup


def test_markup_from_the_data_is_shown_and_does_not_run(hostile, browser):
    browser.open(hostile.as_uri() + "#stop=4")
    for i in range(browser.js("$('policies').children.length")):
        browser.js(f"$('policies').children[{i}].click()")
        for step in (1, 2, 4):
            browser.js(f"change({{ step: {step} }})")
        browser.js("change({ step: 1 })")
        browser.wait(600)  # so that the status line speaks, and onerror would run
        assert browser.js("[document.title, document.images.length]") == [TITLE, 0]
        assert f"</script>{IMAGE}" in browser.js("$('said1').textContent")
    assert f"</script>{IMAGE}" in browser.js("$('policies').textContent")
    assert browser.has_no_errors()


# -- The numbers -------------------------------------------------------------------------


def numbers_of(folder: str, choices: list[str]) -> list[dict]:
    return fit.read_records([page.RESULTS / folder], choices)


def dumb_mean(folder: str, **choice) -> float:
    """Mean validation loss of the runs with these fields, from the lines of the file."""
    losses = []
    for line in (page.RESULTS / folder / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        if all(record[name] == value for name, value in choice.items()):
            losses.append(record["val_loss"])
    assert len(losses) == 2
    return sum(losses) / 2


@pytest.mark.parametrize("decay", (0, 0.1, 0.3))
def test_step_1_shows_the_losses_and_the_law_of_the_records(data, decay):
    (policy,) = [p for p in data["policies"] if p["name"] == f"weight decay {decay}"]
    for batch in policy["batches"]:
        for best, losses, ends in zip(batch["best"], batch["val_loss"], batch["ends"]):
            for lr, loss in zip(batch["rates"], losses):
                run = {"weight_decay": decay, "lr": lr, "batch_size": batch["batch"]}
                expected = dumb_mean("memory-laptop", total_tokens=best["T"], **run)
                assert loss == pytest.approx(expected, abs=1e-6)
            # the distances at the ends of the branches are those of the validation loss
            assert np.diff(ends) == pytest.approx(np.diff(losses), abs=2e-4)
    records = numbers_of("memory-laptop", [f"weight_decay={decay}"])
    law = fit.law(records)
    assert f"{policy['law']['b'][0]:.3g}" == f"{law['b']:.3g}"
    assert policy["law"]["b"][1:] == pytest.approx(law["b_interval"], abs=1e-6)
    cells = {(m.batch_size, m.T): m.x for m in fit.minima(records)}
    shown = {(b["batch"], c["T"]): c["x"] for b in policy["batches"] for c in b["best"]}
    assert shown == pytest.approx(cells, abs=1e-6)


def test_a_policy_with_one_seed_is_not_shown():
    folder = page.RESULTS / "memory-laptop"
    assert page.policy("x", folder, ["weight_decay=0.1", "seed=0"]) is None


def made_up_curves(noise: float) -> tuple[dict, dict]:
    """Curves of three rates that share the noise of the batches, and the curves without it."""
    rng = np.random.default_rng(0)
    shared = rng.normal(0, noise, 1 << 20)  # a loss for every 10 tokens
    found, clean = {}, {}
    for T in page.LENGTHS:
        tokens = np.linspace(0, T, 201)[1:].round(-1)
        for k, lr in enumerate(page.RATES[8]):
            u = np.log2(tokens) - 20
            done = np.clip((tokens - 0.9 * T) / (0.1 * T), 0, 1)
            loss = 2 - 0.2 * u + 0.02 * k * u**2 - 0.1 * done
            clean[T, k] = loss
            found[8, 0, T, lr] = tokens, loss + shared[(tokens / 10).astype(int)]
    return found, clean


def test_removing_the_noise_that_runs_share_gives_known_curves_back():
    curves, _ = made_up_curves(noise=0.05)
    x, losses = page.trunks(curves, 8, 0)
    u = x - 20
    for k in range(3):
        assert losses[k] - losses[0] == pytest.approx(0.02 * k * u**2, abs=1e-9)
    expected = 2 - 0.2 * u + 0.02 * u**2
    assert np.abs(losses.mean(axis=0) - expected).max() < 0.02


def test_the_drop_of_a_decay_is_that_of_made_up_curves():
    curves, _ = made_up_curves(noise=0.005)
    for T in page.LENGTHS:
        assert page.drop(curves, 8, 0, T) == pytest.approx(0.1, abs=0.01)


def test_step_2_gives_the_exponents_of_fit_py(data, browser):
    fits = fit.fits_of(numbers_of("bend-laptop", BEND))
    expected = {
        "fixed": fits.law.b,
        "best": fit.step_law_reading(fits.found),
        "three": fits.paper[0],
    }
    browser.open(INDEX.as_uri() + "#step=2")
    for name, rows in expected.items():
        value, low, high = (round(x, 2) for x in (rows[0], *fit.interval(rows)))
        browser.js(f"$('readings').querySelector('[value={name}]').click()")
        said = browser.js("$('said2').textContent")
        assert f"T{value:.2f} [{low:.2f}, {high:.2f}]" in said
        slope = browser.js("look.slope")  # of the line that is drawn
        assert slope == pytest.approx(rows[0], abs=1e-5)


def test_step_2_lights_up_the_cells_with_the_lowest_losses(browser):
    cells: dict = {}
    for r in numbers_of("bend-laptop", BEND):
        by_rate = cells.setdefault((r["total_tokens"], r["batch_size"]), {})
        by_rate.setdefault(r["lr"], []).append(r["val_loss"])
    ranking: dict = {}
    for (T, batch), by_rate in cells.items():
        lowest = min(sum(losses) / 2 for losses in by_rate.values() if len(losses) == 2)
        ranking.setdefault(T, []).append((lowest, batch))
    browser.open(INDEX.as_uri())
    for name, count in (("best", 1), ("three", 3)):
        expected = {(T, B) for T, row in ranking.items() for _, B in sorted(row)[:count]}
        found = browser.js(f"chosen('{name}').map((point) => [point.T, point.batch])")
        assert set(map(tuple, found)) == expected


def test_the_cost_of_a_line_is_that_of_the_records(browser):
    records = numbers_of("bend-laptop", BEND)
    found = fit.minima(records)
    q = fit.law(records)["q"]
    center = np.mean(sorted({math.log2(m.T) for m in found}))
    browser.open(INDEX.as_uri())
    for middle, slope in ((-7.4, -0.27), (-7.1, -0.75), (-7.8, 0.4)):
        costs = []
        for m in found:
            x, loss = zip(*m.points)
            at = (
                middle
                + slope * (math.log2(m.T) - center)
                + q * math.log2(m.batch_size / 8)
            )
            costs.append(np.interp(at, x, loss) - min(loss))
        # the page looks the cost up in a table with a step of 0.02
        assert browser.js(f"cost({middle}, {slope})") == pytest.approx(
            np.mean(costs), abs=2e-4
        )


@pytest.mark.parametrize("T", (400_000, 3_200_000))
def test_schedules_are_those_of_schedules_py(browser, T):
    race = {"power": {"a": 0.506, "b": -0.3, "q": 0.5}, "beta": 0.25}
    race |= {"lr_max": 0.006, "warmup": 100_000}
    run = {"T": T, "lr": 0.008, "min_lr_ratio": 0.1}
    tokens = [T * i / 80 for i in range(81)]
    warm = race["warmup"]
    trunk = schedules.warmup(schedules.power_law(0.506, -0.3, 0.25, 0.006, 0.5), warm)
    expected = {
        f"powerOf({json.dumps(race)})": trunk,
        f"powerOf({json.dumps(race)}, {T})": schedules.decay(trunk, T, T / 10, "exp"),
        f"cosineOf({json.dumps(race)}, {json.dumps(run)})": schedules.warmup(
            schedules.cosine(0.008, warm, T, 0.1), warm
        ),
    }
    browser.open(INDEX.as_uri())
    for code, schedule in expected.items():
        found = browser.js(f"{tokens}.map({code})")
        assert found == pytest.approx([schedule(n) for n in tokens], 1e-9, 1e-15)


def test_step_3_shows_the_losses_of_the_records(data, browser):
    lines = (page.RESULTS / "curves-laptop/records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    lines = (page.RESULTS / "curves-laptop/curves.jsonl").read_text().splitlines()
    curves = {curve["run"]: curve for curve in map(json.loads, lines)}
    for i, run in enumerate(data["race"]["lengths"]):
        for name, schedule in (("power", "power"), ("planned", "cosine")):
            losses = [
                r["val_loss"]
                for r in records
                if (r["schedule"], r["total_tokens"]) == (schedule, run["T"])
                and (schedule == "cosine" or r["decay_tokens"])
            ]
            assert sorted(run["losses"][name]) == pytest.approx(sorted(losses), abs=1e-4)
        longest = [curves[f"cosine-3200000-{seed}"] for seed in range(3)]
        cut = [np.interp(run["T"], c["tokens"], c["val_loss"]) for c in longest]
        assert run["losses"]["cut"] == pytest.approx(cut, abs=1e-5)
        browser.open(INDEX.as_uri() + f"#step=3&stop3={i}")
        said = " ".join(browser.js("$('said3').textContent").split())
        if i < 3:
            above = np.mean(cut) - np.mean(run["losses"]["planned"])
            assert f"cut short here, is {above:.3f} above" in said
        for name in ("power", "planned"):
            assert f"{np.mean(run['losses'][name]):.3f}" in said


def rows_in_browser(records: list[dict]) -> str:
    """JavaScript that parses these records as a dropped file."""
    text = "\n".join(json.dumps(r, default=float) for r in records)
    return f"parse({json.dumps(text)})"


@pytest.mark.parametrize(
    "folder, choices",
    [
        ("bend-laptop", BEND),
        ("memory-laptop", ["weight_decay=0"]),
        ("wsd-laptop", []),  # three widths and three seeds
    ],
)
def test_the_browser_fits_what_fit_py_fits(browser, folder, choices):
    records = numbers_of(folder, choices)
    law = fit.law(records)
    found = {(m.shape, m.T, m.batch_size): m for m in fit.minima(records)}
    browser.open(INDEX.as_uri())
    browser.js(f"globalThis.fitted = fitLaw({rows_in_browser(records)})")
    cells = browser.js("fitted.found.map((c) => [c.shape, c.T, c.batch, c.x])")
    assert len(cells) == len(found)
    for shape, T, batch, x in cells:
        m = found[shape, T, batch]
        if m.why_not:
            assert x is None or math.isnan(x)
        else:
            assert x == pytest.approx(m.x, abs=1e-5)
    a, b, q = browser.js("[2 ** fitted.law.logA, fitted.law.b, fitted.law.q]")
    for name, value in {"a": a, "b": b, "q": q}.items():
        assert f"{value:.3g}" == f"{law[name]:.3g}"
    for name in "bq":
        low, high = browser.js(f"intervalOf(fitted.laws.map((law) => law.{name}))")[1:]
        assert (low, high) == pytest.approx(law[f"{name}_interval"], abs=1e-3)
    for T, batch in ((1e6, 4), (1e13, 1024)):
        seq_len = records[0]["seq_len"]
        beta = batch * seq_len / 4096
        low, high = browser.js(f"bandAt(fitted, {math.log2(T)}, {beta})")
        expected = fit.band(law, T, batch * seq_len)
        assert (2**low, 2**high) == pytest.approx(expected, rel=1e-3)


def test_your_run_has_the_learning_rate_of_the_law_in_a_command_that_train_py_takes(
    browser,
):
    law = fit.law(numbers_of("bend-laptop", BEND))
    for t, size in ((22, 3), (19.5, 5), (43.2, 10)):
        browser.open(INDEX.as_uri() + f"#step=4&tokens={t}&size={size}")
        command = shlex.split(browser.js("$('command').textContent"))
        assert command[:2] == ["python", "train.py"]
        cfg = train.make_config(**train.parse(command[2:])[0])
        assert cfg.schedule == "wsd"
        assert cfg.total_tokens == pytest.approx(2**t, rel=0.005)
        assert cfg.batch_size == 2**size
        expected = fit.predict(law, cfg.total_tokens, cfg.batch_size * 128)
        assert float(f"{cfg.lr:.2g}") == float(f"{expected:.2g}")
        assert ("beyond the runs" in browser.js("$('said4').textContent")) == (t > 22.3)


# -- Your records ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("jsonl", "csv"))
def test_a_file_with_records_is_fitted(browser, tmp_path, kind):
    records = numbers_of("memory-laptop", ["weight_decay=0.3"])
    names = ["lr", "total_tokens", "batch_size", "seq_len", "seed", "val_loss", "shape"]
    rows = [{name: r[name] for name in names} for r in records]
    path = tmp_path / f"mine.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    else:
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(r | {"shape": "a, b"} for r in rows)  # with a comma in quotes
        path.write_text(text.getvalue(), encoding="utf-8")
    law = fit.law(records)
    browser.open(INDEX.as_uri() + "#step=4")
    browser.choose(path)
    about = browser.js("$('about4').textContent")
    assert f"mine.{kind}: {len(rows)} runs" in about
    assert f"T{law['b']:.2f} [" in about and f"beta{law['q']:.2f} [" in about
    browser.js("$('ours').click()")
    assert "our runs of step 2" in browser.js("$('about4').textContent")
    assert browser.has_no_errors()


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("lr,total_tokens,val_loss\n0.1,1000,2.0", "run 1 has no batch_size"),
        (
            '{"lr": 0.1, "total_tokens": 1000, "batch_size": 1, "val_loss": 2}',
            "two run lengths",
        ),
        ("{nonsense", "JSON"),
        ("", "no runs"),
        (
            "lr,total_tokens,batch_size,val_loss,weight_decay\n1,1,1,1,0\n1,2,1,1,0.1",
            "differ in weight_decay",
        ),
        (
            f"lr,total_tokens,batch_size,val_loss,shape\n1,1,1,1,{IMAGE}",
            "two run lengths",
        ),
    ],
)
def test_a_file_that_cannot_be_fitted_is_refused_in_words(
    browser, tmp_path, text, complaint
):
    (path := tmp_path / f"bad{quote(IMAGE, safe='<> ')}.csv").write_text(text)
    browser.open(INDEX.as_uri() + "#step=4")
    before = browser.js("$('command').textContent")
    browser.choose(path)
    assert complaint in browser.js("$('about4').textContent")
    assert browser.js("$('command').textContent") == before
    assert browser.js("[document.title, document.images.length]") == [TITLE, 0]
    assert browser.has_no_errors()


# -- Handles, buttons and the address ----------------------------------------------------

STEPS = "STEPS.map(([step]) => step)"
CONTROLS = (
    "[...document.querySelectorAll('#step{} {}')].filter((x) => x.checkVisibility())"
)
ALL = "[JSON.stringify(state), location.hash, document.querySelector('main').innerHTML]"


def test_every_slider_works_by_keyboard_and_the_address_repeats_it(browser):
    moved = set()
    for start in ("step=1", "step=2&reading=drag", "step=3", "step=4"):
        browser.open(f"{INDEX.as_uri()}#{start}")
        step = browser.js("state.step")
        names = browser.js(
            CONTROLS.format(step, "input[type=range]") + ".map((x) => x.id)"
        )
        for name in names:
            before = browser.js(ALL)
            browser.press(f"$('{name}')", key="ArrowRight", windowsVirtualKeyCode=39)
            after = browser.js(ALL)
            assert all(x != y for x, y in zip(before, after)), name
            assert browser.js(f"$('{name}').ariaValueText")
            moved.add(name)
        browser.wait(600)
        everything = browser.js(ALL)
        browser.open(INDEX.as_uri() + everything[1])
        browser.wait(600)
        assert browser.js(ALL)[:2] == everything[:2]
        assert browser.js("$('status').textContent")
        assert browser.has_no_errors()
    sliders = browser.js(
        "[...document.querySelectorAll('input[type=range]')].map((x) => x.id)"
    )
    assert moved == set(sliders)


def test_every_button_works_by_keyboard(browser):
    for step in (1, 2, 3, 4):
        browser.open(f"{INDEX.as_uri()}#step={step}")
        buttons = CONTROLS.format(step, "button")
        for i in range(browser.js(f"{buttons}.length")):
            before = browser.js(f"{buttons}[{i}].ariaPressed")
            browser.press(f"{buttons}[{i}]", key="Enter", text="\r")
            after = browser.js(f"{buttons}[{i}].ariaPressed")
            assert before is None or after == "true", (step, i)
        assert browser.has_no_errors()
    for i, step in enumerate(browser.js(STEPS)):
        browser.press(f"$('steps').children[{i}]", key="Enter", text="\r")
        visible = browser.js(
            "[...document.querySelectorAll('section:not([hidden])')].map(s => s.id)"
        )
        assert visible == [f"step{step}"]


@pytest.mark.parametrize(
    "start, chart, move, name",
    [
        ("step=1&seen=0.1", "rates", "f.px(22.3), f.y0", "stop"),
        ("step=1&seen=0.1", "best", "f.px(22.3), f.y0", "stop"),
        ("step=1", "best:guess", "f.px(22), f.py(-9)", "guess"),
        ("step=2&reading=drag", "points:middle", "f.px(20), f.py(-8.5)", "middle"),
        ("step=2&reading=drag", "points:end", "f.px(43), f.py(-8)", "slope"),
        ("step=3", "losses", "f.px(21.6), f.y0", "stop3"),
        ("step=3", "schedules", "f.px(3.2e6), f.y0", "stop3"),
    ],
)
def test_every_handle_can_be_dragged_even_outside_its_chart(
    browser, start, chart, move, name
):
    browser.open(f"{INDEX.as_uri()}#{start}")
    chart, _, handle = chart.partition(":")
    begin = f"document.querySelector('#{chart} [data-drag={handle or name}] circle')"
    box = browser.js(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                     f"({begin}.getBoundingClientRect())")  # fmt: skip
    if not handle:
        box = browser.js(f"(({{x, y}}) => [x + frames.{chart}.x0 + 3, y + 30])"
                         f"($('{chart}').getBoundingClientRect())")  # fmt: skip
    x, y = browser.js(f"((f, b) => [[{move}][0] + b.x, [{move}][1] + b.y])"
                      f"(frames.{chart}, $('{chart}').getBoundingClientRect())")  # fmt: skip
    before = browser.js(f"state.{name}")
    browser.mouse("mousePressed", *box)
    browser.mouse("mouseMoved", (box[0] + x) / 2, (box[1] + y) / 2)
    browser.mouse("mouseMoved", x, 735)  # below the chart, which has captured the pointer
    browser.mouse("mouseMoved", x, y)
    browser.mouse("mouseReleased", x, y)
    after = browser.js(f"state.{name}")
    assert after != before
    expected = {"stop": 4, "stop3": 3, "guess": -9, "middle": -8.5}
    if name in expected:
        assert after == pytest.approx(expected[name], abs=0.15)
    assert f"{name}=" in browser.js("location.hash")
    assert browser.js("String(getSelection())") == ""
    assert browser.has_no_errors()


@pytest.mark.parametrize(
    "address",
    [
        "step=1.5&stop=1e3&guess=Infinity&shown=7",
        "step=-1&stop=x&guess=&policy=none&batch=9",
        "step=2&reading=toString&slope=-1e300&middle=NaN&asked=fixed,nonsense",
        "step=2&reading=drag&slope=Infinity&middle=-Infinity",
        "step=4&tokens=1e308&size=0.3",
        "question=1.5&a=Infinity&q=1e3&b=-1e300&__proto__=1&constructor=2",
        "seen=%3Cimg%20src=x%3E&policy=%3Cimg%20src=x%3E",
        "%",
    ],
)
def test_garbage_in_the_address_becomes_a_state_that_can_be_shown(browser, address):
    browser.open(f"{INDEX.as_uri()}#{address}")
    state = browser.js("state")
    limits = browser.js("NUMBERS")
    for name, (_, low, high, step) in limits.items():
        assert low <= state[name] <= high
        steps = (state[name] - low) / step
        assert steps == pytest.approx(round(steps), abs=1e-6)
    for name, values in browser.js("CHOICES").items():
        assert state[name] in values
    text = browser.js("document.querySelector('main').innerText")
    assert not re.search(r"NaN|Infinity|undefined", text)
    assert "NaN" not in browser.js("document.querySelector('main').innerHTML")
    assert browser.has_no_errors()


def test_an_arrow_down_lowers_every_slider(browser):
    for start in ("step=1&stop=2", "step=2&reading=drag", "step=3&stop3=2", "step=4"):
        browser.open(f"{INDEX.as_uri()}#{start}")
        step = browser.js("state.step")
        sliders = CONTROLS.format(step, "input[type=range]") + ".map((x) => x.id)"
        for name in browser.js(sliders):
            before = browser.js(f"state.{name}")
            browser.press(f"$('{name}')", key="ArrowDown", windowsVirtualKeyCode=40)
            assert browser.js(f"state.{name}") < before, name


def test_links_lead_to_files_and_to_the_paper(browser):
    browser.open(INDEX.as_uri())
    links = browser.js("[...document.links].map((link) => link.getAttribute('href'))")
    assert "https://arxiv.org/abs/2408.13359" in links and "../README.md" in links
    for link in links:
        assert link.startswith("https://") or (INDEX.parent / link).exists(), link


def test_share_copies_the_address(browser):
    browser.open(INDEX.as_uri() + "#stop=3")
    browser.js(
        "navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }"
    )
    browser.js("change({ batch: 32 })")
    browser.press("$('share')", key="Enter", text="\r")
    browser.wait(100)
    assert browser.js("copied") == browser.js("location.href")
    assert "batch=32" in browser.js("copied") and "stop=3" in browser.js("copied")


@pytest.mark.parametrize("guess", [-7, -11])
def test_a_guess_costs_what_the_runs_beside_it_lost(browser, guess):
    records = numbers_of("memory-laptop", ["weight_decay=0.1", "batch_size=8"])
    at = {m.T: m for m in fit.minima(records)}
    x, loss = np.transpose(at[5_120_000].points)
    browser.open(INDEX.as_uri() + f"#batch=8&guess={guess}")
    browser.js("$('reveal').click()")
    browser.js("$('guess').value = -8; $('guess').oninput()")  # too late
    said = " ".join(browser.js("$('said1').textContent").split())
    guess = browser.js("state.guess")  # the slider ends at 0.00064
    assert guess != -8
    costs = [np.interp(at_x, x, loss) - min(loss) for at_x in (guess, at[1_280_000].x)]
    how = "about" if guess > x[0] else "more than"
    assert f"Your guess of {2**guess:.2g} costs {how} {costs[0]:.3f} nats" in said
    assert f"would cost about {costs[1]:.3f}" in said


SHOWN = """[...document.querySelectorAll('#best circle')].filter((x) => !x.closest('.handle'))
    .map((x) => round(2 ** frames.best.t(+x.getAttribute('cx')) / 1e4) / 100)"""


def test_nothing_shows_the_answer_before_the_guess(browser):
    browser.open(INDEX.as_uri())

    def is_hidden() -> bool:
        line = browser.js("$('best').querySelectorAll('path[stroke-width=\"3\"]').length")
        return max(browser.js(SHOWN)) <= 1.28 and line == 0

    browser.open(INDEX.as_uri() + "#shown=1")  # no cost, which would tell the distance
    assert "cost" not in browser.js("$('said1').textContent")
    for _ in range(4):
        browser.press("$('stop')", key="ArrowRight", windowsVirtualKeyCode=39)
        assert is_hidden()
    assert browser.js("state.stop") == 2
    browser.js("dragged.stop(30)")
    assert browser.js("state.stop") == 2 and is_hidden()
    browser.js("$('reveal').click()")
    assert max(browser.js(SHOWN)) == 5.12
    browser.js("dragged.stop(0)")  # from now on, STOP is free
    browser.js("dragged.stop(30)")
    assert browser.js("state.stop") == 4
    for button in ("$('batches').children[1]", "$('policies').children[0]"):
        browser.js(f"{button}.click()")
        assert is_hidden(), button
        browser.js("$('reveal').click()")
        assert not is_hidden()
    browser.js("$('policies').children[1].click()")  # whose answer was shown
    assert not is_hidden()
    assert "cost" not in browser.js("$('said1').textContent")
    browser.js("$('reveal').click()")
    assert is_hidden()


# -- What it says ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address, policy, seen",
    [
        ("policy=0", "weight decay 0", ""),
        ("policy=0.3&seen=0,0.1", "weight decay 0.3", "weight decay 0,weight decay 0.1"),
        ("policy=weight+decay+0&seen=weight+decay+0.3", "weight decay 0", "weight decay 0.3"),
        ("policy=0.2", "weight decay 0.1", ""),
    ],
)  # fmt: skip
def test_the_address_takes_short_names_and_writes_them(browser, address, policy, seen):
    browser.open(f"{INDEX.as_uri()}#{address}")
    assert browser.js("[state.policy, state.seen]") == [policy, seen]
    browser.js("write()")
    assert "weight" not in browser.js("location.hash")
    browser.js("read()")
    assert browser.js("[state.policy, state.seen]") == [policy, seen]


def with_exponents(data: dict, interval: list[float]) -> dict:
    """The data of the page with this exponent and interval everywhere."""
    changed = json.loads(json.dumps(data))
    for one in changed["policies"]:
        one["law"]["b"] = interval
    for reading in changed["questions"]["readings"].values():
        reading["ours"] = interval
    return changed


@pytest.mark.parametrize(
    "interval, sign",
    [([0.3, 0.1, 0.5], "rises"), ([-0.3, -0.5, -0.1], "falls"), ([0.2, -0.1, 0.5], "")],
)
def test_a_sign_is_named_only_if_the_interval_excludes_zero(
    data, browser, tmp_path, interval, sign
):
    (path := tmp_path / "index.html").write_text(
        page.page(with_exponents(data, interval)), encoding="utf-8"
    )
    addresses = [f"stop=4&policy={decay}" for decay in (0, 0.1, 0.3)]
    addresses += [f"step=2&reading={name}" for name in page.PAPERS]
    for address in addresses:
        browser.open(f"{path.as_uri()}#{address}")
        said = browser.js("$(`said${state.step}`).textContent")
        found = re.findall(r"\b(falls|rises|grows?)\b", said)
        assert found == ([sign] if sign else []), address
        assert sign or "cannot tell the sign" in said or "neither" in said


def test_the_order_of_the_answers_is_that_of_fits_without_a_batch_size_or_a_seed(data):
    records = numbers_of("bend-laptop", BEND)
    gaps = []
    for name in ("batch_size", "seed"):
        for value in {r[name] for r in records}:
            fits = fit.fits_of([r for r in records if r[name] != value])
            fixed, best, three = (
                rows[0]
                for rows in (fits.law.b, fit.step_law_reading(fits.found), fits.paper[0])
            )
            gaps.append([best - fixed, fixed - three])
    assert data["questions"]["order"] == pytest.approx(np.min(gaps, axis=0), abs=1e-4)
    low, high = np.transpose(
        [r["ours"][1:] for r in data["questions"]["readings"].values()]
    )
    assert data["questions"]["overlap"] == bool(max(low) < min(high))


def test_weight_decay_did_not_help_at_5_12m_tokens():
    for batch_size in page.RATES:
        lowest = {}
        for decay in (0, 0.1, 0.3):
            run = [f"weight_decay={decay}", f"batch_size={batch_size}"]
            found = fit.minima(numbers_of("memory-laptop", run))
            lowest[decay] = min(
                loss for m in found if m.T == 5_120_000 for _, loss in m.points
            )
        assert min(lowest, key=lowest.get) == 0, batch_size


def test_step_3_names_a_winner_only_if_all_seeds_agree(data, browser):
    for i, run in enumerate(data["race"]["lengths"]):
        pairs = zip(run["losses"]["power"], run["losses"]["planned"])
        signs = {math.copysign(1, power - planned) for power, planned in pairs}
        browser.open(f"{INDEX.as_uri()}#step=3&stop3={i}")
        said = browser.js("$('said3').textContent")
        assert ("above it in all 3 seeds" in said) == (signs == {1})
        assert ("below it in all 3 seeds" in said) == (signs == {-1})
        assert ("seeds disagree" in said) == (len(signs) == 2)


def test_no_label_gives_a_loser_a_distance_of_zero(browser):
    browser.open(INDEX.as_uri(), 1280, 720)
    for policy in browser.js("POLICIES"):
        for batch in browser.js("BATCHES"):
            for stop in range(5):
                browser.js(
                    f"change({{policy: '{policy}', batch: {batch}, stop: {stop}}})"
                )
                labels = browser.js("$('rates').textContent")
                assert len(re.findall(r"\+0\.\d+", labels)) == 2
                assert not re.search(r"\+0\.0+(?!\d)", labels), labels


def test_dots_that_the_law_moved_are_hollow_and_beyond_the_runs_nothing_is_copied(
    browser,
):
    fills = """[...$('law').querySelectorAll('circle[stroke]')]
        .map((x) => x.style.fill === 'var(--paper)')"""
    for address, moved, beyond in (
        ("size=3", False, False),
        ("size=10", True, True),
        ("size=3&tokens=43", False, True),
    ):
        browser.open(f"{INDEX.as_uri()}#step=4&{address}")
        assert set(browser.js(fills)) == {moved}
        title = browser.js("$('law-title').textContent")
        assert ("moved by the law from 128" in title) == moved
        assert browser.js("$('copy').checkVisibility()") != beyond


def test_only_the_paper_that_asked_the_same_is_marked_beside_a_line(browser):
    browser.open(f"{INDEX.as_uri()}#step=2&reading=drag")
    marked = [p in browser.js("$('strip').textContent")
              for p in ("Bjorck", "Step Law", "Power Scheduler")]  # fmt: skip
    assert marked == [True, False, False]
    for middle in (-9, -5.5):
        browser.js(f"change({{middle: {middle}}})")  # costs more than the chart shows
        cost = browser.js("nats(cost(state.middle, state.slope) - LOWEST)")
        assert f"↑ {cost}" in browser.js("$('strip').textContent")


# -- How it looks ------------------------------------------------------------------------

VIEWS = [
    "stop=4&shown=1&guess=-4.4&seen=weight+decay+0,weight+decay+0.3",
    "stop=4&policy=weight+decay+0.3&batch=32",
    "stop=1&batch=2",
    "step=2&reading=fixed",
    "step=2&reading=three&asked=fixed,best",
    "step=2&reading=drag",
    "step=3&stop3=0",
    "step=3&stop3=3",
    "step=4",
    "step=4&tokens=43.2&size=13",
    "step=4&tokens=43.2&size=0",
    "step=2&reading=drag&middle=-5.9&slope=-0.32",
    "stop=4&policy=0&batch=8&seen=0.1,0.3&shown=1",
    "stop=2&seen=0",
]
TOO_WIDE = """[...document.querySelectorAll('body *')].filter((x) => x.checkVisibility())
    .filter((x) => x.id !== 'status').filter((x) => { const b = x.getBoundingClientRect();
    return b.width && (b.left < -0.5 || b.right > innerWidth + 0.5); }).map((x) => x.outerHTML)"""
OUTSIDE_SVG = """[...document.querySelectorAll('svg text')].filter((x) => x.checkVisibility())
    .filter((x) => { const b = x.getBoundingClientRect();
    const box = x.ownerSVGElement.getBoundingClientRect(); return b.left < box.left - 1
    || b.right > box.right + 1 || b.top < box.top - 3 || b.bottom > box.bottom + 3; })
    .map((x) => x.textContent)"""


@pytest.mark.parametrize(
    "width, height", [(320, 568), (375, 553), (640, 370), (1000, 740), (1600, 900)]
)
def test_no_text_leaves_its_box(browser, width, height):
    browser.open(INDEX.as_uri(), width, height)
    for view in VIEWS:
        browser.show(view)
        assert browser.js(TOO_WIDE) == [], view
        assert browser.js(OUTSIDE_SVG) == [], view


@pytest.mark.parametrize("view", VIEWS + ["", "step=2&reading=best&asked=fixed,three"])
def test_every_step_fits_on_a_projector_and_says_once_what_to_do(browser, view):
    browser.open(f"{INDEX.as_uri()}#{view}", 1280, 720)
    assert browser.js("document.documentElement.scrollHeight") <= 720
    todo = (
        "[...document.querySelectorAll('.do')].filter((x) => x.checkVisibility()).length"
    )
    assert browser.js(todo) == 1


@pytest.mark.parametrize(
    "view, controls, chart",
    [
        ("", "stop", "rates"),
        ("step=2", "readings", "points"),
        ("step=2&reading=three", "readings", "points"),
        ("step=2&reading=drag", "slope", "points"),
        ("step=3&stop3=2", "stop3", "losses"),
        ("step=4&tokens=43&size=13", "tokens", "law"),
    ],
)
def test_handle_chart_and_verdict_fit_on_the_first_screen_of_a_phone(
    browser, view, controls, chart
):
    browser.open(f"{INDEX.as_uri()}#{view}", 375, 553)
    boxes = f"""[$('{controls}'), $('{chart}'), $(`said${{state.step}}`)]
        .map((x) => x.getBoundingClientRect()).flatMap((b) => [b.top, b.bottom])"""
    edges = browser.js(boxes)
    assert edges == sorted(edges) and 0 <= edges[0] and edges[-1] <= 553


OVERLAPS = """(() => {
  const box = (x) => x.getBoundingClientRect();
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top + 0.25 * a.height < b.bottom - 0.25 * b.height  // letters are lower than their box
    && b.top + 0.25 * b.height < a.bottom - 0.25 * a.height;
  return [...document.querySelectorAll('svg')].filter((x) => x.checkVisibility()).flatMap((svg) => {
    const texts = [...svg.querySelectorAll('text')];
    const dots = [...svg.querySelectorAll('circle')]
      .filter((x) => +x.getAttribute('r') > 5 && x.style.fill !== 'transparent');
    return texts.flatMap((x, i) => [...texts.slice(i + 1), ...dots]
      .filter((y) => meet(box(x), box(y))).map((y) => [x.textContent, y.textContent]));
  });
})()"""


@pytest.mark.parametrize("width, height", [(375, 553), (600, 850), (1280, 720)])
def test_no_label_meets_another_or_hides_behind_a_dot(browser, width, height):
    browser.open(INDEX.as_uri(), width, height)
    for view in VIEWS:
        browser.show(view)
        assert browser.js(OVERLAPS) == [], view


LUMINANCE = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  return [0, 1, 2].map((k) => {
    const probe = document.body.appendChild(document.createElement('i'));
    probe.style.color = colorOfRate(k);
    canvas.fillStyle = getComputedStyle(probe).color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((x) => (x / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  });
})()"""


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_the_curves_of_the_three_learning_rates_differ_in_lightness(browser, scheme):
    browser.open(INDEX.as_uri())
    dark = {"name": "prefers-color-scheme", "value": scheme}
    browser.do("Emulation.setEmulatedMedia", features=[dark])
    first, second, third = browser.js(LUMINANCE)
    for one, other in ((first, second), (second, third)):
        assert (max(one, other) + 0.05) / (min(one, other) + 0.05) > 1.6


FAINT = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const luminance = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = luminance(getComputedStyle(document.documentElement).backgroundColor);
  return [...document.querySelectorAll('text, p, b, a, figcaption')]
    .filter((x) => x.checkVisibility()).filter((x) => {
      const style = getComputedStyle(x);
      const ink = luminance(x.tagName === 'text' ? style.fill : style.color);
      return (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) < 4.5;
    }).map((x) => x.textContent);
})()"""


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_all_text_has_the_contrast_that_wcag_asks_for(browser, scheme):
    browser.open(INDEX.as_uri())
    dark = {"name": "prefers-color-scheme", "value": scheme}
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    browser.do("Emulation.setEmulatedMedia", features=[dark, still])
    for view in VIEWS:
        browser.show(view)
        assert browser.js(FAINT) == [], view


@pytest.mark.parametrize("width, height", [(320, 568), (375, 553), (640, 370)])
@pytest.mark.parametrize(
    "view, slider, chart",
    [
        ("step=1", "stop", "rates"),
        ("step=1", "stop", "best"),
        ("step=2&reading=drag", "slope", "points"),
        ("step=2&reading=drag", "slope", "strip"),
        ("step=3", "stop3", "losses"),
        ("step=3", "stop3", "schedules"),
        ("step=4", "tokens", "law"),
        ("step=4", "size", "valleys"),
    ],
)
def test_the_handle_and_the_chart_that_it_moves_fit_on_a_small_screen(
    browser, width, height, view, slider, chart
):
    browser.open(f"{INDEX.as_uri()}#{view}", width, height)
    browser.js(f"$('{chart}').scrollIntoView({{ block: 'end', behavior: 'instant' }})")
    boxes = f"['{slider}', '{chart}'].map((id) => $(id).getBoundingClientRect())"
    handle, box = browser.js(f"{boxes}.map((b) => [b.top, b.bottom])")
    assert 0 <= handle[0] < handle[1] <= box[0] < box[1] <= height + 1


def test_print_shows_all_steps(browser):
    browser.open(INDEX.as_uri())
    browser.js("dispatchEvent(new Event('beforeprint'))")
    browser.do("Emulation.setEmulatedMedia", media="print")
    for step in browser.js(STEPS):
        charts = f"document.querySelectorAll('#step{step} svg')"
        assert browser.js(f"[...{charts}].map((x) => x.checkVisibility())") == [
            True,
            True,
        ]
    browser.js("dispatchEvent(new Event('afterprint'))")
    browser.do("Emulation.setEmulatedMedia", media="")
    assert browser.js("document.querySelectorAll('section:not([hidden])').length") == 1


def test_the_page_has_one_main_and_one_status_line_that_waits(browser):
    browser.open(INDEX.as_uri())
    assert browser.js("document.querySelectorAll('main').length") == 1
    live = "document.querySelectorAll('[role=status], [aria-live], output[aria-live]').length"
    assert browser.js(live) == 1
    browser.wait(600)
    before = browser.js("$('status').textContent")
    browser.js("change({ stop: 3 })")
    assert (
        browser.js("$('status').textContent") == before
    )  # nothing is read out while dragging
    browser.wait(600)
    assert "2.56M" in browser.js("$('status').textContent")


def test_ci_says_which_tests_it_skipped_and_what_they_need(tmp_path):
    ci = (page.ROOT / ".ci/run").read_text("utf-8")
    (options,) = re.findall("PYTEST_ADDOPTS=(.+?)  #", ci)
    # an empty PATH, so without Chromium
    env = os.environ | {"PATH": str(tmp_path), "PYTEST_ADDOPTS": options}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += [__file__, "-k", "one_main"]
    run = subprocess.run(command, env=env, cwd=page.ROOT, capture_output=True, text=True)
    assert run.returncode == 0
    assert re.search(r"^SKIPPED .+: no Chromium; install", run.stdout, re.M)
    assert "google-chrome" in (page.ROOT / "docs/extend.md").read_text("utf-8")
