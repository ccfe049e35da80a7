"""The page to drag, in a headless Chromium, against fit.py, schedules.py and a dumb loop."""

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

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not PROGRAM, reason="no chromium on this machine")
INDEX = page.ROOT / "docs/index.html"
SLIDERS = ["guess", "a", "b", "q", "T", "batch", "stop"]
VISIBLE = "[...document.querySelectorAll('{}')].filter(x => x.checkVisibility())"


class Browser:
    """A Chromium that reads commands from a pipe and writes answers to another."""

    def __init__(self, profile: Path):
        read, self.commands = os.pipe()
        self.answers, write = os.pipe()
        script = f'exec "$@" 3<&{read} 4>&{write}'  # the numbers that Chromium expects
        flags = ["--headless", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        command = ["bash", "-c", script, "bash", PROGRAM, *flags]
        self.process = subprocess.Popen(command, pass_fds=(read, write), **quiet)
        os.close(read), os.close(write)
        self.buffer, self.events, self.number, self.session = b"", [], 0, {}
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.do("Target.attachToTarget", targetId=target, flatten=True)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def receive(self) -> dict:
        while b"\0" not in self.buffer:
            some = os.read(self.answers, 2**16)
            assert some, "the browser has gone"
            self.buffer += some
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def do(self, method: str, **params) -> dict:
        self.number += 1
        call = dict(id=self.number, method=method, params=params) | self.session
        os.write(self.commands, json.dumps(call).encode() + b"\0")
        while (message := self.receive()).get("id") != self.number:
            self.events.append(message)
        return message["result"]

    def open(self, url: str, width: int = 1000) -> None:
        size = dict(width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        self.do("Emulation.setDeviceMetricsOverride", **size)
        for address in ("about:blank", url):  # a new hash alone would not load
            self.events.clear()
            self.do("Page.navigate", url=address)
            while all(e["method"] != "Page.loadEventFired" for e in self.events):
                self.events.append(self.receive())

    def js(self, code: str):
        answer = self.do("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, (code, answer)
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            event = dict(type=kind, key=key, windowsVirtualKeyCode=code)
            self.do("Input.dispatchKeyEvent", **event, **({"text": " "} if key == " " else {}))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.process.terminate()
    browser.process.wait()


def test_the_program_builds_the_committed_page_which_loads_nothing():
    text = INDEX.read_bytes()
    assert text == page.page().encode() and len(text) < 400_000
    assert re.findall(rb"\bsrc=|@import|url\(|fetch\(|<link|import\(|https?:", text) == []


@needs_browser
def test_fit_is_that_of_fit_py(browser):
    expected = fit.law(read_records([page.FOLDER]))
    browser.open(INDEX.as_uri())
    for key in ("fit", "ours"):
        browser.js(f"document.querySelector('#laws [value={key}]').click()")
        assert browser.js("['a', 'b', 'q'].map(name => state[name])") == [
            pytest.approx(expected[name], rel=5e-4) for name in "abq"
        ]


@needs_browser
@pytest.mark.parametrize("T", [4e9, 8.25e9, 16e9, 32e9])
@pytest.mark.parametrize("beta", [16, 64, 256])
def test_schedules_are_those_of_schedules_py(browser, T, beta):
    curves = schedules.paper_curves(T, beta)
    flat = schedules.warmup(schedules.constant(schedules.best_lr(T, beta)), 1e9)
    curves["linear"] = schedules.decay(flat, T, T - 1e9, "linear")
    grid = [T * i / 400 for i in range(401)]
    found = browser.js(f"Object.entries(schedules({T}, {beta})).map(([name, lr]) => "
                       f"[name.toLowerCase(), {grid}.map(lr)])")  # fmt: skip
    expected = {name: pytest.approx([lr(n) for n in grid], rel=1e-9) for name, lr in curves.items()}
    assert dict(found) == expected


def dumb_cost(runs: list[dict], log_lr: float) -> tuple[float, int]:
    """Loss at this learning rate minus the lowest measured, and -1 or 1 outside."""
    losses: dict = {}
    for r in runs:
        losses.setdefault(math.log(r["lr"]), []).append(r["val_loss"])
    seeds = len({r["seed"] for r in runs})
    valley = sorted((x, sum(some) / seeds) for x, some in losses.items() if len(some) == seeds)
    lowest, (left, first), (right, last) = min(y for _, y in valley), valley[0], valley[-1]
    if not left <= log_lr <= right:
        return (first - lowest, -1) if log_lr < left else (last - lowest, 1)
    for (x0, y0), (x1, y1) in zip(valley, valley[1:]):
        if log_lr <= x1:
            return y0 + (y1 - y0) * (log_lr - x0) / (x1 - x0) - lowest, 0


@needs_browser
def test_costs_are_those_of_a_dumb_loop(browser):
    cells: dict = {}
    for r in read_records([page.FOLDER]):
        cells.setdefault((r["shape"], r["total_tokens"], r["batch_size"]), []).append(r)
    browser.open(INDEX.as_uri())
    laws = browser.js("Object.values(LAWS).map(law => law[1])")
    for law in [dict(a=0.3, b=-0.22, q=0.61), dict(a=0.02, b=0, q=1), *laws]:
        found = browser.js(f"score({law})")
        all_cells = browser.js(f"DATA.cells.map(cell => lookUp({law}, cell))")
        costs = []
        for at in all_cells:
            cell = at["cell"]["shape"], at["cell"]["T"], at["cell"]["batch"]
            beta = cell[2] * 128 / 4096
            log_lr = math.log(law["a"]) + law["b"] * math.log(cell[1]) + law["q"] * math.log(beta)
            cost, outside = dumb_cost(cells.pop(cell) if False else cells[cell], log_lr)
            assert (at["cost"], at["outside"]) == (pytest.approx(cost, abs=1e-6), outside)
            assert sum(at["seeds"]) / 3 == pytest.approx(cost, abs=1e-6)
            costs.append(cost)
        assert len(costs) == len(cells) and found["worst"]["cost"] == pytest.approx(max(costs), abs=1e-6)
        assert found["mean"] == pytest.approx(sum(costs) / len(costs), abs=1e-6)


@needs_browser
def test_every_slider_and_button_works_and_the_address_repeats_it(browser):
    browser.open(INDEX.as_uri())
    assert browser.js(VISIBLE.format("[type=range]") + ".map(x => x.id)") == SLIDERS
    picture = "[JSON.stringify(state), location.hash, document.body.innerHTML]"
    for slider in SLIDERS:
        before = browser.js(picture)
        browser.js(f"$('{slider}').focus()")
        browser.press("ArrowLeft", 37)
        assert all(x != y for x, y in zip(before, browser.js(picture))), slider
        assert browser.js(f"$('{slider}').ariaValueText === $('{slider}-value').textContent")
    n = browser.js(VISIBLE.format("button") + ".length")
    for i in range(n):
        browser.js(f"document.querySelectorAll('button')[{i}].focus()")
        browser.press(" ", 32)
        assert browser.js("document.activeElement.ariaPressed") in ("true", None)
    browser.js("document.querySelector('td:nth-of-type(3) input').focus()")
    browser.press("ArrowRight", 39)
    assert browser.js("document.activeElement.ariaLabel").startswith("width 128, T = 640k")
    state, address, html = browser.js(picture)
    browser.open(INDEX.as_uri() + address)
    assert browser.js(picture) == [state, address, html]
    trouble = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
    assert [e for e in browser.events if e["method"] in trouble] == []
    asked = [e["params"]["request"]["url"] for e in browser.events if "request" in e["params"]]
    assert asked == [INDEX.as_uri() ]
