"""The page to drag, in a headless Chromium, against its data."""

import json
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


RACE = DATA["race"]
LENGTHS = {length["T"]: length for length in RACE["lengths"]}


def test_its_schedules_are_those_of_schedules(browser):
    """Of all runs behind the losses, and of runs that nobody trained."""
    rows = fit.read_sweep(page.RESULTS / "laptop-decay")
    older = dict(warmup_start=0)  # fields that the records lack
    configs = [SimpleNamespace(**older | row) for row in rows]
    for T, share in ((1_200_000, 0.3), (600_000, 0.5)):
        length = dict(total_tokens=T, decay_share=share)
        configs += [make_config(schedule=kind, **length) for kind in ("power", "wsd")]
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
def test_step_1_says_how_far_from_power_the_others_end(browser, T):
    losses = LENGTHS[T]["losses"]
    browser.open(f"end={T // 1000}")
    said = browser.text("said1")
    assert f"Power ends at {losses['Power']:.3f} nats" in said
    assert LENGTHS[T]["power"][1][-1] == pytest.approx(losses["Power"], abs=1e-4)
    for name in ("WSD", "cosine", "linear"):
        assert f"{name} {losses[name] - losses['Power']:+.3f}" in said
    cut = np.interp(T, *LENGTHS[3_200_000]["cosine"]) - losses["cosine"]
    assert (f"ends {cut:.3f} above" in said) == (T < 3_200_000)


@pytest.mark.parametrize("T, share", [(800_000, 30), (800_000, 10), (1_200_000, 30)])
def test_step_1_shows_no_loss_that_nobody_measured(browser, T, share):
    """Decayed runs only where they ended, and otherwise the run that goes on."""
    losses = {"cut short": np.interp(T, *LENGTHS[3_200_000]["cosine"])}
    ended = LENGTHS.get(T, {"losses": {}})["losses"]
    losses |= {name: ended[name] for name in ("cosine", "linear") if name in ended}
    if (T, share) == (800_000, 30):
        losses |= ended
    else:
        losses["no decay"] = np.interp(T, *RACE["trunk"])
    browser.open(f"end={T // 1000}&share={share}")
    texts = browser.js(
        "[...$('losses').querySelectorAll('text')].map((x) => x.textContent)"
    )
    found = {text for text in texts if re.match(r"\d\.\d{3} ", text)}
    assert found == {f"{loss:.3f} {name}" for name, loss in losses.items()}
    assert ("Power ends at" in browser.text("said1")) == ("Power" in losses)


def test_a_guess_costs_what_the_runs_beside_it_lost(browser):
    (batch,) = [b for b in DATA["policies"][1]["batches"] if b["batch"] == 8]
    best = {cell["T"]: cell["x"] for cell in batch["best"]}
    x, above = np.transpose(batch["valley"])
    browser.open("step=2&batch=8&guess=-7")
    browser.js("$('reveal').click()")
    costs = [np.interp(at, x, above) for at in (-7, best[1_280_000])]
    said = browser.text("said2")
    assert f"Your guess of {2**-7:.2g} costs about {costs[0]:.3f} nats" in said
    assert f"would cost about {costs[1]:.3f}" in said


def test_nothing_shows_the_answer_before_the_guess(browser):
    shown = """[...document.querySelectorAll('#best circle')]
        .filter((x) => !x.closest('.handle'))
        .map((x) => round(2 ** frames.best.x(+x.getAttribute('cx')) / 1e4) / 100)"""

    def is_hidden() -> bool:
        line = browser.js("$('best').querySelectorAll('path[stroke-width=\"3\"]').length")
        return max(browser.js(shown)) <= 1.28 and line == 0

    browser.open("step=2&shown=1")  # no cost, which would tell the distance
    assert "cost" not in browser.text("said2")
    for _ in range(4):
        browser.press("$('stop')", key="ArrowRight", windowsVirtualKeyCode=39)
        assert is_hidden()
    browser.js("$('reveal').click()")
    assert max(browser.js(shown)) == 5.12
    browser.js("$('policies').children[0].click()")
    assert is_hidden()


# -- Handles, buttons and the address ----------------------------------------------------


@pytest.mark.parametrize(
    "view, names", [("step=1", ("end", "share")), ("step=2&stop=0", ("stop", "guess"))]
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


# -- How it looks ------------------------------------------------------------------------


@pytest.mark.parametrize("width, height", [(320, 568), (1280, 720)])
@pytest.mark.parametrize(
    "view", ["step=1", "step=1&end=1200&share=50", "step=2&stop=4&shown=1&seen=0,0.3"]
)
def test_a_step_fits_on_a_telephone_and_a_projector(browser, view, width, height):
    browser.open(view, width, height)
    page = "document.documentElement"
    assert browser.js(f"{page}.scrollWidth") <= width
    if width == 1280:
        assert browser.js(f"{page}.scrollHeight") <= height
