"""The page to drag, in a headless Chromium, against its data."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import page
import pytest

from tools import figures

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
INDEX = page.ROOT / "docs/index.html"
DATA = json.loads(page.source("page_data.json"))


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

    def open(
        self, view: str = "", width: int = 1000, height: int = 740, file=INDEX
    ) -> None:
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
        self.do("Page.navigate", url=f"{file.as_uri()}#{view}")
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

    def text(self, element: str) -> str:
        return " ".join(self.js(f"$('{element}').textContent").split())

    def wait(self, milliseconds: int) -> None:
        promise = f"new Promise((done) => setTimeout(done, {milliseconds}))"
        self.js(promise, awaitPromise=True)

    def press(self, element: str, **key) -> None:
        self.js(f"{element}.focus()")
        self.do("Input.dispatchKeyEvent", type="keyDown", **key)
        self.do("Input.dispatchKeyEvent", type="keyUp", **key)

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1}
        self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=1, **button)

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


# -- The file ----------------------------------------------------------------------------


def test_the_program_builds_the_committed_page_which_loads_nothing():
    text = INDEX.read_text(encoding="utf-8")
    assert text == page.page()
    links = text.replace('href="https://arxiv.org/abs/2408.13359"', "")
    for word in ("src=", "url(", "<link", "http", "fetch(", "{{"):
        assert word not in links, word


def test_colors_are_those_of_the_figures(browser):
    browser.open()
    style = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
    for name, color in figures.COLORS.items():
        assert browser.js(style.format(name)) == color
    assert browser.js(style.format("tokens-low")) == figures.HUES["tokens"][0]


def test_links_lead_to_files_and_to_the_paper(browser):
    browser.open()
    links = browser.js("[...document.links].map((link) => link.getAttribute('href'))")
    assert "https://arxiv.org/abs/2408.13359" in links
    for link in links:
        assert link.startswith("https://") or (INDEX.parent / link).exists(), link


# -- What it says ------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [-7, -11])
def test_a_guess_costs_what_the_runs_beside_it_lost(browser, guess):
    (batch,) = [b for b in DATA["policies"][1]["batches"] if b["batch"] == 8]
    best = {cell["T"]: cell["x"] for cell in batch["best"]}
    x, above = np.transpose(batch["valley"])
    browser.open(f"batch=8&guess={guess}")
    browser.js("$('reveal').click()")
    browser.js("$('guess').value = -8; $('guess').oninput()")  # too late
    guess = browser.js("state.guess")  # the slider ends at 0.00064
    assert guess != -8
    costs = [np.interp(at, x, above) for at in (guess, best[1_280_000])]
    how = "about" if guess > x[0] else "more than"
    said = browser.text("said1")
    assert f"Your guess of {2**guess:.2g} costs {how} {costs[0]:.3f} nats" in said
    assert f"would cost about {costs[1]:.3f}" in said


def test_nothing_shows_the_answer_before_the_guess(browser):
    shown = """[...document.querySelectorAll('#best circle')]
        .filter((x) => !x.closest('.handle'))
        .map((x) => round(2 ** frames.best.x(+x.getAttribute('cx')) / 1e4) / 100)"""

    def is_hidden() -> bool:
        line = browser.js("$('best').querySelectorAll('path[stroke-width=\"3\"]').length")
        return max(browser.js(shown)) <= 1.28 and line == 0

    browser.open("shown=1")  # no cost, which would tell the distance
    assert "cost" not in browser.text("said1")
    for _ in range(4):
        browser.press("$('stop')", key="ArrowRight", windowsVirtualKeyCode=39)
        assert is_hidden()
    browser.js("dragged.stop(30)")
    assert browser.js("state.stop") == 2 and is_hidden()
    browser.js("$('reveal').click()")
    assert max(browser.js(shown)) == 5.12
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
    assert "cost" not in browser.text("said1")
    browser.js("$('reveal').click()")
    assert is_hidden()


@pytest.mark.parametrize(
    "b, words",
    [
        ([0.3, 0.1, 0.5], "learning rate rises with T"),
        ([-0.3, -0.5, -0.1], "learning rate falls with T"),
        ([0.2, -0.1, 0.5], "neither a fall nor a rise"),
    ],
)
def test_a_sign_is_named_only_if_the_interval_excludes_zero(browser, b, words):
    browser.open("stop=4")
    browser.js(f"policyOf(state.policy).b = {b}; render()")
    said = browser.text("said1")
    assert words in said and f"T{b[0]:.2f} [{b[1]:.2f}, {b[2]:.2f}]" in said


def test_step_2_shows_the_losses_and_names_a_winner_only_if_all_seeds_agree(browser):
    for i, run in enumerate(DATA["race"]["lengths"]):
        power, planned, cut = (
            np.array(run["losses"][k]) for k in ("power", "planned", "cut")
        )
        browser.open(f"step=2&end={i}")
        said = browser.text("said2")
        assert f"{planned.mean():.3f} nats, and Power at {power.mean():.3f}." in said
        assert ("above it in all 3 seeds" in said) == all(power > planned)
        assert ("below it in all 3 seeds" in said) == all(power < planned)
        above = f"cut short here, is {cut.mean() - planned.mean():.3f} above"
        assert (above in said) == (i < 3)


def test_no_label_gives_a_loser_a_distance_of_zero(browser):
    browser.open("", 1280, 720)
    for policy in browser.js("POLICIES"):
        for batch in browser.js("BATCHES"):
            for stop in range(5):
                browser.js(
                    f"change({{policy: '{policy}', batch: {batch}, stop: {stop}}})"
                )
                labels = browser.js("$('rates').textContent")
                assert len(re.findall(r"\+0\.\d+", labels)) == 2
                assert not re.search(r"\+0\.0+(?!\d)", labels), labels


# -- Handles, buttons and the address ----------------------------------------------------


@pytest.mark.parametrize(
    "view, names", [("stop=0", ["stop", "guess"]), ("step=2", ["end"])]
)
def test_a_slider_works_by_keyboard_and_the_address_repeats_it(browser, view, names):
    everything = "[JSON.stringify(state), location.hash]"
    browser.open(view)
    sliders = "[...document.querySelectorAll('input')].filter((x) => x.checkVisibility())"
    assert browser.js(f"{sliders}.map((x) => x.id)") == names
    for name in names:
        before = browser.js(f"[state.{name}, $('status').textContent]")
        browser.press(f"$('{name}')", key="ArrowRight", windowsVirtualKeyCode=39)
        assert browser.js(f"state.{name}") > before[0]
        # nothing is read out while a slider moves, and something a moment later
        assert browser.js("$('status').textContent") == before[1]
    browser.wait(600)
    assert browser.js("$('status').textContent") != before[1]
    state, address = browser.js(everything)
    browser.open(address[1:])
    assert browser.js(everything) == [state, address]
    assert browser.has_no_errors()


@pytest.mark.parametrize(
    "step, groups", [(1, ["policies", "batches", "steps"]), (2, ["steps"])]
)
def test_every_button_works_by_keyboard(browser, step, groups):
    browser.open(f"step={step}")
    for group in groups:
        for i in range(browser.js(f"$('{group}').children.length")):
            button = f"$('{group}').children[{i}]"
            browser.press(button, key="Enter", text="\r")
            pressed = f"{button}.ariaPressed ?? String({button}.ariaCurrent === 'step')"
            assert browser.js(pressed) == "true", (group, i)
    visible = "[...document.querySelectorAll('section')].map((x) => x.checkVisibility())"
    assert browser.js(visible) == [False, True]
    assert browser.has_no_errors()


@pytest.mark.parametrize(
    "start, chart, move, name, expected",
    [
        ("seen=0.1", "rates", "f.px(22.3), f.y0", "stop", 4),
        ("seen=0.1", "best", "f.px(22.3), f.y0", "stop", 4),
        ("", "best", "f.px(22), f.py(-9)", "guess", -9),
        ("step=2", "losses", "f.px(21.6), f.y0", "end", 3),
        ("step=2", "schedules", "f.px(3.2e6), f.y0", "end", 3),
    ],
)
def test_a_handle_can_be_dragged_even_outside_its_chart(
    browser, start, chart, move, name, expected
):
    browser.open(start)
    handle = f"document.querySelector('#{chart} [data-drag={name}] circle')"
    center = "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
    box = browser.js(f"{center}({handle}.getBoundingClientRect())")
    x, y = browser.js(
        f"((f, b) => [[{move}][0] + b.x, [{move}][1] + b.y])"
        f"(frames.{chart}, $('{chart}').getBoundingClientRect())"
    )
    browser.mouse("mousePressed", *box)
    browser.mouse("mouseMoved", x, 735)  # below the chart, which has captured the pointer
    browser.mouse("mouseMoved", x, y)
    browser.mouse("mouseReleased", x, y)
    assert browser.js(f"state.{name}") == pytest.approx(expected, abs=0.15)
    assert f"{name}=" in browser.js("location.hash")
    assert browser.js("String(getSelection())") == ""
    assert browser.has_no_errors()


@pytest.mark.parametrize(
    "address",
    [
        "step=1.5&stop=1e3&guess=Infinity&shown=7",
        "step=-1&stop=x&guess=&policy=none&batch=9",
        "step=2&end=NaN&__proto__=1&constructor=2",
        "seen=%3Cimg%20src=x%3E&policy=%3Cimg%20src=x%3E",
        "%",
    ],
)
def test_garbage_in_the_address_becomes_a_state_that_can_be_shown(browser, address):
    browser.open(address)
    state = browser.js("state")
    for name, (_, low, high, step) in browser.js("NUMBERS").items():
        assert low <= state[name] <= high
        steps = (state[name] - low) / step
        assert steps == pytest.approx(round(steps), abs=1e-6)
    for name, values in browser.js("CHOICES").items():
        assert state[name] in values
    shown = browser.js("document.querySelector('main').innerHTML")
    assert not re.search(r"NaN|Infinity|undefined|<img", shown)
    assert browser.has_no_errors()


@pytest.mark.parametrize(
    "address, policy, seen",
    [
        ("policy=0.3&seen=0,0.1", "weight decay 0.3", "weight decay 0,weight decay 0.1"),
        ("policy=0.2", "weight decay 0.1", ""),
    ],
)
def test_the_address_takes_short_names_and_writes_them(browser, address, policy, seen):
    browser.open(address)
    assert browser.js("[state.policy, state.seen]") == [policy, seen]
    browser.js("write()")
    assert "weight" not in browser.js("location.hash")
    browser.js("read()")
    assert browser.js("[state.policy, state.seen]") == [policy, seen]


# -- How it looks ------------------------------------------------------------------------

VIEWS = [
    "",
    "stop=1",
    "stop=2&seen=0",
    "stop=4&shown=1&guess=-4.4&seen=0,0.3",
    "stop=4&policy=0&batch=8&seen=0.1,0.3&shown=1",
    "stop=4&policy=0.3&batch=32",
    "step=2",
    "step=2&end=3",
]
TOO_WIDE = """[...document.querySelectorAll('body *')].filter((x) => x.checkVisibility())
    .filter((x) => x.id !== 'status').filter((x) => { const b = x.getBoundingClientRect();
    return b.width && (b.left < -0.5 || b.right > innerWidth + 0.5); }).map((x) => x.outerHTML)"""
OUTSIDE_SVG = """[...document.querySelectorAll('svg text')].filter((x) => x.checkVisibility())
    .filter((x) => { const b = x.getBoundingClientRect();
    const box = x.ownerSVGElement.getBoundingClientRect(); return b.left < box.left - 1
    || b.right > box.right + 1 || b.top < box.top - 3 || b.bottom > box.bottom + 3; })
    .map((x) => x.textContent)"""
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


@pytest.mark.parametrize(
    "width, height", [(320, 568), (375, 553), (600, 850), (640, 370), (1280, 720)]
)
def test_labels_stay_in_their_chart_and_do_not_meet(browser, width, height):
    browser.open("", width, height)
    for view in VIEWS:
        browser.show(view or "step=1")
        assert browser.js(TOO_WIDE) == [], view
        assert browser.js(OUTSIDE_SVG) == [], view
        assert browser.js(OVERLAPS) == [], view


@pytest.mark.parametrize("view", VIEWS)
def test_every_step_fits_on_a_projector(browser, view):
    browser.open(view, 1280, 720)
    assert browser.js("document.documentElement.scrollHeight") <= 720


@pytest.mark.parametrize("width, height", [(320, 568), (375, 553), (640, 370)])
@pytest.mark.parametrize(
    "view, slider, chart",
    [
        ("step=1", "stop", "rates"),
        ("step=1", "stop", "best"),
        ("step=2", "end", "losses"),
        ("step=2", "end", "schedules"),
    ],
)
def test_a_slider_and_the_chart_that_it_moves_fit_on_a_small_screen(
    browser, width, height, view, slider, chart
):
    browser.open(view, width, height)
    browser.js(f"$('{chart}').scrollIntoView({{ block: 'end', behavior: 'instant' }})")
    boxes = f"['{slider}', '{chart}'].map((id) => $(id).getBoundingClientRect())"
    handle, box = browser.js(f"{boxes}.map((b) => [b.top, b.bottom])")
    assert 0 <= handle[0] < handle[1] <= box[0] < box[1] <= height + 1


LUMINANCE = """(color) => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}"""
FAINT = """(() => {
  const luminance = LUMINANCE;
  const paper = luminance(getComputedStyle(document.documentElement).backgroundColor);
  return [...document.querySelectorAll('text, p, b, a, figcaption')]
    .filter((x) => x.checkVisibility()).filter((x) => {
      const style = getComputedStyle(x);
      const ink = luminance(x.tagName === 'text' ? style.fill : style.color);
      return (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) < 4.5;
    }).map((x) => x.textContent);
})()""".replace("LUMINANCE", LUMINANCE)
RATES = """[0, 1, 2].map((k) => {
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.color = colorOfRate(k);
  return (LUMINANCE)(getComputedStyle(probe).color);
})""".replace("LUMINANCE", LUMINANCE)


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_text_has_the_contrast_that_wcag_asks_for_and_curves_differ_in_gray(
    browser, scheme
):
    browser.open()
    dark = {"name": "prefers-color-scheme", "value": scheme}
    browser.do("Emulation.setEmulatedMedia", features=[dark])
    for view in VIEWS:
        browser.show(view or "step=1")
        assert browser.js(FAINT) == [], view
    one, two, three = sorted(browser.js(RATES))
    assert (two + 0.05) / (one + 0.05) > 1.6 < (three + 0.05) / (two + 0.05)
