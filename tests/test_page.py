"""The page to drag, in a headless Chromium, against its data."""

import json
import math
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import page
import pytest

import fit
from config import make_config
from schedules import make_schedule

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
INDEX = page.ROOT / "docs/index.html"
TEXT = INDEX.read_text(encoding="utf-8")
DATA = json.loads(re.search(r"^const DATA = (.*);$", TEXT, re.M)[1])

# -- The file ----------------------------------------------------------------------------


def test_the_program_builds_the_committed_page_which_loads_nothing():
    assert TEXT == page.page(DATA)
    links = TEXT.replace('href="https://arxiv.org/abs/2408.13359"', "")
    for word in ("src=", "url(", "<link", "http", "fetch(", "{{"):
        assert word not in links, word


def flat(content) -> list[float]:
    """All numbers in lists and dicts."""
    return [float(x) for x in re.findall(r"-?\d[-+.e\d]*", json.dumps(content))]


def test_its_numbers_are_those_of_the_records():
    """But for last digits, which depend on the processor."""
    assert flat(page.numbers()) == pytest.approx(flat(DATA), abs=0.002)


def test_its_laws_are_the_published_ones():
    """b and its interval at every weight decay, which fit.py once printed."""
    laws = [policy["b"] for policy in DATA["policies"]]
    assert laws == [[0.01, -0.22, 0.24], [-0.32, -0.51, -0.13], [-0.38, -0.53, -0.23]]


# -- A browser ---------------------------------------------------------------------------


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

    def open(self, view: str = "", width: int = 1000, height: int = 740) -> None:
        """Open the page with this state after # in its address."""
        self.seen = []
        if self.session:
            # a new address after # alone would not load the page again
            self.do("Page.navigate", url="about:blank")
        else:
            tab = self.do("Target.createTarget", url="about:blank")
            self.session = self.do("Target.attachToTarget", flatten=True, **tab)
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.do("Emulation.setDeviceMetricsOverride", mobile=width < 500, **size)
        self.do("Runtime.enable")
        self.do("Log.enable")
        self.do("Page.navigate", url=f"{INDEX.as_uri()}#{view}")
        while self.js("document.readyState") != "complete":
            pass

    def js(self, code: str, **more):
        answer = self.do("Runtime.evaluate", expression=code, returnByValue=True, **more)
        assert "exceptionDetails" not in answer, (code, answer)
        return answer["result"].get("value")

    def text(self, element: str) -> str:
        return " ".join(self.js(f"$('{element}').textContent").split())

    def press(self, element: str, **key) -> None:
        self.js(f"{element}.focus()")
        self.do("Input.dispatchKeyEvent", type="keyDown", **key)
        self.do("Input.dispatchKeyEvent", type="keyUp", **key)

    def has_no_errors(self) -> bool:
        return not {"Runtime.exceptionThrown", "Log.entryAdded"} & set(self.seen)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no Chromium; install chromium or google-chrome")
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


# -- What it says ------------------------------------------------------------------------


LINES = {line["name"]: line for line in DATA["pilot"]["lines"]}
TRIED = {  # schedule of step 1 -> the learning rate or peak of a run, and its runs
    "WSD": (lambda row: row["lr"], "decay-laptop/30"),
    "Power": (lambda row: row["power_a"] * 0.5 * 320_000**-0.3, "anytime/price"),
    "linear": (lambda row: row["lr"], "decay-laptop/linear"),
}
ANSWER = "step=1&long=1&wsd=-6.4&power=-7&linear=-6"


def cubics(name: str, T: int) -> list[np.poly1d]:
    """A cubic per seed, and one of their mean, through the 7 runs nearest the lowest."""
    rate_of, folder = TRIED[name]
    losses = {}
    for row in fit.read_sweep(page.RESULTS / folder):
        if (row["batch_size"], row["total_tokens"]) == (8, T) and row["seed"] < 3:
            x = round(math.log2(rate_of(row)), 3)
            losses.setdefault(x, {})[row["seed"]] = row["loss"]
    lowest = min(losses, key=lambda x: sum(losses[x].values()))
    near = sorted(losses, key=lambda x: abs(x - lowest))[:7]
    y = np.array([[losses[x][seed] for seed in range(3)] for x in near])
    y = np.column_stack([y, y.mean(axis=1)])
    return [np.poly1d(np.polyfit(near, column, 3)) for column in y.T]


def lowest_of(cubic: np.poly1d) -> float:
    """The minimum of a cubic, as log2 of a learning rate."""
    second = cubic.deriv(2)
    return next(x.real for x in cubic.deriv().roots if second(x.real) > 0)


def in_words(values, digits: int = 3, of=float) -> str:
    """Their mean with its 95% interval; t for two degrees of freedom has a closed form."""
    t = 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    half = t * np.std(values, ddof=1) / math.sqrt(3)
    center = np.mean(values)
    low, mean, high = (
        f"{of(x):.{digits}f}" for x in (center - half, center, center + half)
    )
    return f"{mean} [{low}, {high}]"


def same_numbers(found: str, expected: str) -> bool:
    """The same text, but for last digits."""
    number = r"-?\d+\.\d+"
    pairs = zip(re.findall(number, found), re.findall(number, expected))
    near = all(abs(float(one) - float(other)) < 0.0021 for one, other in pairs)
    return near and re.sub(number, "", found) == re.sub(number, "", expected)


@pytest.mark.parametrize("which, T", [(0, 320_000), (1, 5_120_000)])
def test_step_1_says_how_far_the_chosen_learning_rates_are_from_the_bottoms(
    browser, which, T
):
    chosen = {"WSD": -6.4, "Power": -7.0, "linear": -5.2}  # linear is not near
    at = "&".join(f"{name.lower()}={x}" for name, x in chosen.items())
    browser.open(f"long={which}&{at}")
    cells = "[...$('ends').rows].slice(1).map((row) => [...row.cells].map(textOf))"
    clean = "const textOf = (x) => x.textContent.trim().replace(/\\s+/g, ' ')"
    rows = browser.js(f"(() => {{ {clean}; return {cells} }})()")

    curves = {name: cubics(name, T) for name in LINES}
    bottoms = {name: lowest_of(of[3]) for name, of in curves.items()}
    best = min(LINES, key=lambda name: curves[name][3](bottoms[name]))
    assert f"above the lowest ({best})" in browser.text("ends")
    for name, *found in rows:
        *seeds, mean = curves[name]
        loss, x = mean(chosen[name]), bottoms[name]
        above = [cubic(chosen[name]) - cubic(x) for cubic in seeds]
        lowest = [cubic(bottoms[best]) for cubic in curves[best][:3]]
        above_lowest = np.array([cubic(chosen[name]) for cubic in seeds]) - lowest
        expected = [f"{loss:.3f}", in_words(above), in_words(above_lowest)]
        assert all(map(same_numbers, found, expected)), (name, found, expected)
        (mark,) = [
            text
            for text in browser.js(texts_of(f"valley-{name.lower()}"))
            if text.startswith("+")
        ]
        assert same_numbers(mark, f"+{np.mean(above):.3f}")


def texts_of(chart: str) -> str:
    return f"[...$('{chart}').querySelectorAll('text')].map((x) => x.textContent)"


def test_step_1_says_whose_bottom_moved_and_whose_number_is_good(browser):
    browser.open(ANSWER + "&worst=linear")
    said = browser.text("said1")
    found = dict(re.findall(r"(\w+) × ([\d.]+ \[.*?\])", said))
    moved = said[said.index("moved") : said.index("undecided")]
    costs, ends = {}, {}
    for name, line in LINES.items():
        bottoms = np.array([valley["bottoms"] for valley in line["valleys"]])
        octaves = bottoms[1] - bottoms[0]
        expected = in_words(octaves, 2, lambda x: 2**x)
        assert found[name] == expected
        low, high = (float(x) for x in re.findall(r"[\d.]+", expected)[1:])
        assert (f"{name} ×" in moved) == (not low <= 1 <= high)
        (x,) = [float(x) for x in re.findall(f"{name.lower()}=(-[\\d.]+)", ANSWER)]
        *seeds, _ = cubics(name, 5_120_000)
        ends[name] = np.array([cubic(x) for cubic in seeds])
        mean = cubics(name, 5_120_000)[3]
        costs[name] = ends[name].mean() - mean(lowest_of(mean))
    farthest = max(costs, key=costs.get)
    assert said.startswith(f"{farthest} is farthest from its bottom")
    assert ("not linear" in said) == (farthest != "linear")
    good = ", ".join(name for name in LINES if costs[name] < 0.01) or "none"
    assert f"Within 0.01 nats: {good}." in said
    for name in ("WSD", "linear"):
        expected = in_words(ends[name] - ends["Power"])
        ending = said[said.index("Minus Power") :]
        (text,) = re.findall(f"{name}.*? (-?0\\.\\d+ \\[.*?\\])", ending)
        assert same_numbers(text, expected)


def test_step_1_shows_no_long_run_before_it_is_asked(browser):
    browser.open("step=1")
    for name in LINES:
        assert "5.12M" not in browser.js(texts_of(f"valley-{name.lower()}"))
    assert "320k" in browser.js("$('ends').caption.textContent")
    browser.js("$('run').click()")
    for name in LINES:
        assert "5.12M" in browser.js(texts_of(f"valley-{name.lower()}"))
    assert "5.12M" in browser.js("$('ends').caption.textContent")


def test_step_1_says_when_all_are_at_their_bottoms(browser):
    at = {name.lower(): line["valleys"][0]["bottom"] for name, line in LINES.items()}
    browser.open("&".join(f"{name}={x}" for name, x in at.items()))
    assert browser.text("said1").startswith("All are within 0.01 nats")
    browser.open("&".join(f"{name}={x}" for name, x in (at | {"wsd": -8}).items()))
    assert browser.text("said1") == "Not within 0.01 nats of the bottom: WSD."


RACE = DATA["race"]
LENGTHS = {length["T"]: length for length in RACE["lengths"]}


def test_its_schedules_are_those_of_schedules(browser):
    """Of all runs behind the losses, and of runs that nobody trained."""
    rows = fit.read_sweep(page.RESULTS / "laptop-decay")
    older = dict(warmup_start=0)  # fields that the records lack
    configs = [SimpleNamespace(**older | row) for row in rows]
    for T, share in ((1_200_000, 0.3), (600_000, 0.5)):
        length = dict(total_tokens=T, decay_share=share)
        configs.append(make_config(schedule="power", **length))
        configs.append(make_config(schedule="wsd", lr=RACE["wsd_lr"], **length))
        peaks = {
            "cosine": RACE["peak"] * (T / 3_200_000) ** RACE["b"],
            "linear": RACE["linear_peak"],
        }
        for kind, lr in peaks.items():
            configs.append(make_config(schedule=kind, total_tokens=T, lr=lr))
    calls = {
        "power": "decay(STABLE.Power, {T}, {share})",
        "wsd": "decay(STABLE.WSD, {T}, {share})",
        "cosine": "planned('cosine', {T})",
        "linear": "planned('linear', {T})",
    }
    browser.open()
    for cfg in configs:
        T = cfg.total_tokens
        schedule = make_schedule(cfg)
        call = calls[cfg.schedule].format(T=T, share=cfg.decay_tokens / T)
        tokens = np.linspace(0, T, 98)[:-1].tolist()
        found = browser.js(f"{tokens}.map({call})")
        assert found == pytest.approx([schedule(n) for n in tokens], rel=1e-3), call


@pytest.mark.parametrize("T", [400_000, 3_200_000])
def test_step_2_says_how_far_from_power_the_cosines_end(browser, T):
    losses = LENGTHS[T]["losses"]
    browser.open(f"step=2&end={T // 1000}")
    said = browser.text("said2")
    assert f"Power ends at {losses['Power']:.3f} nats" in said
    assert LENGTHS[T]["power"][1][-1] == pytest.approx(losses["Power"], abs=1e-4)
    above = losses["cosine"] - losses["Power"]
    side = "below" if above < 0 else "above"
    assert f"the cosine {abs(above):.3f} {side}." in said
    cut = np.interp(T, *LENGTHS[3_200_000]["cosine"]) - losses["cosine"]
    assert (f"ends {cut:.3f} above" in said) == (T < 3_200_000)


@pytest.mark.parametrize("T", [800_000, 1_200_000])
def test_step_2_shows_no_loss_that_nobody_measured(browser, T):
    """Decayed runs only where they ended, and otherwise the run that goes on."""
    losses = {"cut short": np.interp(T, *LENGTHS[3_200_000]["cosine"])}
    if T in LENGTHS:
        losses |= LENGTHS[T]["losses"]
    else:
        losses["no decay"] = np.interp(T, *RACE["trunk"])
    browser.open(f"step=2&end={T // 1000}")
    texts = browser.js(texts_of("losses"))
    found = {text for text in texts if re.match(r"\d\.\d{3} ", text)}
    assert found == {f"{loss:.3f} {name}" for name, loss in losses.items()}
    assert ("Power ends at" in browser.text("said2")) == ("Power" in losses)


def test_a_guess_costs_what_the_runs_beside_it_lost(browser):
    (batch,) = [b for b in DATA["policies"][1]["batches"] if b["batch"] == 8]
    best = {cell["T"]: cell["x"] for cell in batch["best"]}
    x, above = np.transpose(batch["valley"])
    browser.open("step=3&batch=8&guess=-7")
    browser.js("$('reveal').click()")
    costs = [np.interp(at, x, above) for at in (-7, best[1_280_000])]
    said = browser.text("said3")
    assert f"Your guess of {2**-7:.2g} costs about {costs[0]:.3f} nats" in said
    assert f"would cost about {costs[1]:.3f}" in said


def test_nothing_shows_the_answer_before_the_guess(browser):
    shown = """[...document.querySelectorAll('#best circle')]
        .filter((x) => !x.closest('.handle'))
        .map((x) => round(2 ** frames.best.x(+x.getAttribute('cx')) / 1e4) / 100)"""

    def is_hidden() -> bool:
        line = browser.js("$('best').querySelectorAll('path[stroke-width=\"3\"]').length")
        return max(browser.js(shown)) <= 1.28 and line == 0

    browser.open("step=3&shown=1")  # no cost, which would tell the distance
    assert "cost" not in browser.text("said3")
    for _ in range(4):
        browser.press("$('stop')", key="ArrowRight", windowsVirtualKeyCode=39)
        assert is_hidden()
    browser.js("$('reveal').click()")
    assert max(browser.js(shown)) == 5.12
    browser.js("$('policies').children[0].click()")
    assert is_hidden()


# -- Handles, buttons and the address ----------------------------------------------------


@pytest.mark.parametrize(
    "view, names",
    [
        ("step=1&wsd=-7&power=-7&linear=-7", ("wsd", "power", "linear")),
        ("step=2", ("end",)),
        ("step=3&stop=0", ("stop", "guess")),
    ],
)
def test_a_slider_works_by_keyboard_and_the_address_repeats_it(browser, view, names):
    everything = "[JSON.stringify(state), location.hash]"
    browser.open(view)
    for name in names:
        before = browser.js(f"state.{name}")
        browser.press(f"$('{name}')", key="ArrowRight", windowsVirtualKeyCode=39)
        assert browser.js(f"state.{name}") > before
    state, address = browser.js(everything)
    browser.open(address[1:])
    assert browser.js(everything) == [state, address]
    assert browser.has_no_errors()


def test_a_mistyped_address_becomes_a_state_that_can_be_shown(browser):
    browser.open("step=9&stop=x&policy=<img src=x>&batch=9")
    shown = browser.js("document.querySelector('main').innerHTML")
    assert not re.search(r"NaN|Infinity|undefined|<img", shown)
    assert browser.has_no_errors()


def test_links_to_a_state_open_the_step_that_has_its_controls(browser):
    links = set()
    for file in (page.ROOT / "README.md", *page.ROOT.glob("docs/*.md")):
        links |= set(re.findall(r"index\.html#([^)]+)", file.read_text("utf-8")))
    assert len(links) > 3
    controls = {"batch": "batches", "policy": "policies"}
    for link in links:
        browser.open(link)
        for name in re.findall(r"(\w+)=", link):
            if name != "step":
                control = controls.get(name, name)
                assert browser.js(f"$('{control}').checkVisibility()"), link


# -- How it looks ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [420, 1000])
def test_numbers_are_beside_the_ends_and_the_definition_before_the_charts(browser, width):
    browser.open("step=3&stop=2", width, 740)
    (batch,) = [b for b in DATA["policies"][1]["batches"] if b["batch"] == 2]
    losses = batch["val_loss"][2]
    ends = [text for text in browser.js(texts_of("rates")) if " " in text]
    assert len([text for text in ends if "lowest" in text]) == 1
    for loss in losses:
        if loss > min(losses):
            assert any(f"+{loss - min(losses):.3f}" in text for text in ends)
    top = "(x) => x.getBoundingClientRect().top"
    for step in (1, 2, 3):
        browser.open(f"step={step}", width, 740)
        tops = "[...document.querySelectorAll('{}')].filter((x) => x.checkVisibility())"
        lead = browser.js(f"{tops.format('.lead')}.map({top})")
        charts = browser.js(f"{tops.format('.chart')}.map({top})")
        assert lead and max(lead) < min(charts)


@pytest.mark.parametrize("width, height", [(320, 568), (1280, 720)])
@pytest.mark.parametrize(
    "view",
    [
        "step=1",
        f"{ANSWER}&worst=linear",
        "step=2&end=1200",
        "step=3&stop=4&shown=1&seen=0,0.3",
    ],
)
def test_a_step_fits_on_a_telephone_and_a_projector(browser, view, width, height):
    browser.open(view, width, height)
    page = "document.documentElement"
    assert browser.js(f"{page}.scrollWidth") <= width
    if width == 1280:
        assert browser.js(f"{page}.scrollHeight") <= height
