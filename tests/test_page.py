"""The page to drag in a headless Chromium, against fit.py, schedules.py and a dumb loop."""

import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tools import page
from tools.compare import read_records

import fit
import schedules

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(not PROGRAM, reason="no chromium on this machine")
INDEX = page.ROOT / "docs/index.html"
TROUBLE = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
LAWS = {"a": "0.3", "b": "-0.22", "q": "0.61"}  # some law that no button has
SLIDERS = ["guess", "a", "b", "q", "T", "batch", "stop"]


class Browser:
    """A Chromium that gets its commands through a pipe (Chrome DevTools Protocol)."""

    def __init__(self, profile: Path):
        read, self.commands = os.pipe()
        self.answers, write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        script = f'exec "$@" 3<&{read} 4>&{write}'  # the two numbers that Chromium expects
        command = ["bash", "-c", script, "bash", PROGRAM, *flags, f"--user-data-dir={profile}"]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, pass_fds=(read, write), **quiet)
        os.close(read), os.close(write)
        self.buffer, self.events, self.number, self.session = b"", [], 0, {}
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def receive(self) -> dict:
        while b"\0" not in self.buffer:
            self.buffer += os.read(self.answers, 2**16) or b'{"id": -1}\0'
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def do(self, method: str, **params) -> dict:
        self.number += 1
        call = dict(id=self.number, method=method, params=params) | self.session
        os.write(self.commands, json.dumps(call).encode() + b"\0")
        while (message := self.receive()).get("id") != self.number:
            assert message.get("id") != -1, "the browser has gone"
            self.events.append(message)
        return message["result"]

    def open(self, url: str, width: int = 1000) -> None:
        size = dict(width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        self.do("Emulation.setDeviceMetricsOverride", **size)
        for address in ("about:blank", url):  # from # to # would not load
            self.events.clear()
            self.do("Page.navigate", url=address)
            while not any(e["method"] == "Page.loadEventFired" for e in self.events):
                self.events.append(self.receive())

    def js(self, code: str):
        answer = self.do("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, (code, answer)
        return answer["result"].get("value")

    def key(self, name: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Tab": 9, "ArrowRight": 39, " ": 32}[name]
            self.do("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.process.terminate()
    browser.process.wait()


@pytest.fixture(scope="module")
def records():
    return read_records([page.FOLDER])


def move(browser, slider: str) -> None:
    browser.js(f"$('{slider}').stepDown(7); $('{slider}').dispatchEvent(new Event('input'))")
    browser.js(f"$('{slider}').dispatchEvent(new Event('change', {{ bubbles: true }}))")


def test_the_committed_page_is_the_one_that_the_program_builds_and_loads_nothing():
    text = INDEX.read_bytes()
    assert text == page.page().encode() and len(text) < 400_000
    assert re.findall(rb"\b(?:src|srcset)=|@import|url\(|fetch\(|<link|import\(", text) == []


@needs_browser
def test_it_loads_without_errors_and_requests(browser):
    browser.open(INDEX.as_uri())
    assert [e for e in browser.events if e["method"] in TROUBLE] == []
    asked = [e["params"]["request"]["url"] for e in browser.events if "request" in e["params"]]
    assert asked == [INDEX.as_uri()]


@needs_browser
def test_fit_is_that_of_fit_py(browser, records):
    expected = fit.law(records)
    for key in ("fit", "ours"):
        browser.js(f"document.querySelector('#laws [value={key}]').click()")
        found = browser.js("({ a: state.a, b: state.b, q: state.q })")
        assert {n: f"{found[n]:.3g}" for n in "abq"} == {n: f"{expected[n]:.3g}" for n in "abq"}


@needs_browser
def test_schedules_are_those_of_schedules_py(browser):
    for T in (4e9, 8.25e9, 16e9, 32e9):
        for beta in (16, 64, 256):
            curves = schedules.paper_curves(T, beta)
            flat = schedules.warmup(schedules.constant(schedules.best_lr(T, beta)), 1e9)
            curves["linear"] = schedules.decay(flat, T, T - 1e9, "linear")
            code = f"Object.entries(schedules({T}, {beta})).map(([name, lr]) => [name.toLowerCase(), "
            found = browser.js(code + f"[...Array(401).keys()].map(i => lr({T} * i / 400))])")
            for name, values in found:
                expected = [curves[name](T * i / 400) for i in range(401)]
                assert values == pytest.approx(expected, rel=1e-9, abs=1e-12), name
            assert {name for name, _ in found} == set(curves)


def cost(runs: list[dict], log_lr: float) -> tuple[float, int]:
    """Loss at this learning rate minus the lowest measured, and whether it is outside."""
    losses: dict = {}
    for r in runs:
        losses.setdefault(r["lr"], []).append(r["val_loss"])
    seeds = len({r["seed"] for r in runs})
    valley = sorted((math.log(lr), sum(x) / seeds) for lr, x in losses.items() if len(x) == seeds)
    outside = (log_lr > valley[-1][0]) - (log_lr < valley[0][0])
    at = min(max(log_lr, valley[0][0]), valley[-1][0])
    for (x0, y0), (x1, y1) in zip(valley, valley[1:]):
        if x0 <= at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0) - min(y for _, y in valley), outside


@needs_browser
def test_costs_are_those_of_a_dumb_loop(browser, records):
    laws = [LAWS, dict(a=0.02, b=0, q=1)] + browser.js("Object.values(LAWS).map(law => law[1])")
    cells: dict = {}
    for r in records:
        cells.setdefault((r["shape"], r["total_tokens"], r["batch_size"]), []).append(r)
    for law in laws:
        a, b, q = (float(law[name]) for name in "abq")
        found = browser.js(f"DATA.cells.map(cell => [[cell.shape, cell.T, cell.batch], "
                           f"lookUp({{ a: {a}, b: {b}, q: {q} }}, cell)])")  # fmt: skip
        for cell, at in found:
            log_lr = math.log(a) + b * math.log(cell[1]) + q * math.log(cell[2] * 128 / 4096)
            expected = cost(cells[tuple(cell)], log_lr)
            assert (at["cost"], at["outside"]) == (pytest.approx(expected[0], abs=1e-6), expected[1])
            assert sum(at["seeds"]) / len(at["seeds"]) == pytest.approx(at["cost"], abs=1e-6)
        mean = browser.js(f"score({{ a: {a}, b: {b}, q: {q} }}).mean")
        assert mean == pytest.approx(sum(at["cost"] for _, at in found) / len(cells)) 
        assert len(found) == len(cells)


@needs_browser
def test_every_slider_and_button_changes_the_state_and_the_address(browser):
    browser.open(INDEX.as_uri())
    assert browser.js("[...document.querySelectorAll('[type=range]')].filter(x => "
                      "x.checkVisibility()).map(x => x.id)") == SLIDERS  # fmt: skip
    for slider in SLIDERS:
        before = browser.js("[JSON.stringify(state), location.hash, document.body.innerText]")
        move(browser, slider)
        after = browser.js("[JSON.stringify(state), location.hash, document.body.innerText]")
        assert all(x != y for x, y in zip(before, after)), slider
        assert browser.js(f"$('{slider}').ariaValueText === $('{slider}-value').textContent")
    for i in range(browser.js("document.querySelectorAll('button').length")):
        before = browser.js("location.hash")
        browser.js(f"document.querySelectorAll('button')[{i}].click()")
        named, pressed = browser.js(f"(b => [b.id, b.ariaPressed])(document.querySelectorAll('button')[{i}])")
        assert named == "show" or pressed == "true"
    times = browser.js("""['guess', 'b', 'q', 'stop'].map(id => { const start = performance.now();
        $(id).stepUp(); $(id).dispatchEvent(new Event('input')); document.body.offsetHeight;
        return performance.now() - start; })""")
    print("milliseconds from input to layout:", [round(t, 1) for t in times])
