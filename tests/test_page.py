"""The page to drag, in a headless Chromium, against fit.py, schedules.py and a dumb loop."""

import json
import math
import os
import re
import shutil
import subprocess

import pytest
from tools import page
from tools.compare import read_records

import fit
import schedules

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
INDEX = page.ROOT / "docs/index.html"
SLIDERS = ["guess", "a", "b", "q", "T", "batch", "stop"]
SHOWN = "[...document.querySelectorAll('{}')].filter(x => x.checkVisibility())"
ALL = "[JSON.stringify(state), location.hash, document.body.innerHTML]"
LOADED = "new Promise(f => document.readyState === 'complete' ? f() : addEventListener('load', f))"


class Browser:
    """A Chromium that reads commands from a pipe and writes answers to another."""

    def __init__(self, profile):
        (read, self.commands), (answers, write) = os.pipe(), os.pipe()
        self.answers, self.number = os.fdopen(answers, "rb"), 0
        script = f'exec "$@" 3<&{read} 4>&{write} 2>&-'  # Chromium expects 3 and 4
        flags = ["--headless", "--no-sandbox", "--remote-debugging-pipe"]
        command = ["bash", "-c", script, "bash", CHROMIUM, *flags, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(command, pass_fds=(read, write))
        os.close(read), os.close(write)

    def do(self, method: str, **params) -> dict:
        self.number += 1
        call = dict(id=self.number, method=method, params=params) | self.session
        os.write(self.commands, json.dumps(call).encode() + b"\0")
        message: dict = {}
        while message.get("id") != self.number:
            self.seen.append(message.get("method"))
            message = json.loads(b"".join(iter(lambda: self.answers.read(1) or b"\0", b"\0")))
        return message["result"]

    def open(self, url: str, width: int = 1000) -> None:
        self.session, self.seen = {}, []
        tab = self.do("Target.createTarget", url="about:blank")
        self.session = self.do("Target.attachToTarget", flatten=True, **tab)
        size = dict(width=width, height=740, deviceScaleFactor=1, mobile=width < 500)
        self.do("Emulation.setDeviceMetricsOverride", **size)
        for method in ("Runtime.enable", "Log.enable"):
            self.do(method)
        self.do("Page.navigate", url=url)
        self.js(LOADED)

    def js(self, code: str):
        call = dict(expression=code, returnByValue=True, awaitPromise=True)
        answer = self.do("Runtime.evaluate", **call)
        assert "exceptionDetails" not in answer, (code, answer)
        return answer["result"].get("value")

    def press(self, element: str, **key) -> None:
        self.js(f"{element}.focus()")
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, **key)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no chromium on this machine")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.process.terminate()
    browser.process.wait()


def test_the_program_builds_the_committed_page_which_loads_nothing():
    text = INDEX.read_bytes()
    assert text == page.page().encode() and len(text) < 400_000
    assert re.findall(rb"\bsrc=|@import|url\(|fetch\(|<link|import\(|https?:", text) == []


def test_schedules_are_those_of_schedules_py(browser):
    browser.open(INDEX.as_uri())
    for T, beta in [(4e9, 16), (8.25e9, 64), (16e9, 256), (32e9, 128)]:
        curves, grid = schedules.paper_curves(T, beta), [T * i / 80 for i in range(81)]
        flat = schedules.warmup(schedules.constant(schedules.best_lr(T, beta)), 1e9)
        curves["linear"] = schedules.decay(flat, T, T - 1e9, "linear")
        found = browser.js(f"Object.entries(schedules({T}, {beta})).map(([name, f]) => "
                           f"[name.toLowerCase(), {grid}.map(f)])")  # fmt: skip
        expected = {name: [schedule(n) for n in grid] for name, schedule in curves.items()}
        assert dict(found) == {x: pytest.approx(expected[x], 1e-9, 1e-15) for x in expected}


def dumb_cost(runs: list[dict], log_lr: float) -> tuple[float, int]:
    """Loss at this learning rate minus the lowest measured, and -1 or 1 outside."""
    losses: dict = {}
    for r in runs:
        losses.setdefault(math.log(r["lr"]), []).append(r["val_loss"])
    valley = sorted((x, sum(three) / 3) for x, three in losses.items() if len(three) == 3)
    at = min(max(log_lr, valley[0][0]), valley[-1][0])
    for (x0, y0), (x1, y1) in zip(valley, valley[1:]):
        if x0 <= at <= x1:
            cost = y0 + (y1 - y0) * (at - x0) / (x1 - x0) - min(y for _, y in valley)
    return cost, (log_lr > at) - (log_lr < at)


def test_costs_are_those_of_a_dumb_loop_and_fit_is_that_of_fit_py(browser):
    records, cells = read_records([page.FOLDER]), {}
    for r in records:
        cells.setdefault((r["shape"], r["total_tokens"], r["batch_size"]), []).append(r)
    browser.open(INDEX.as_uri())
    laws = browser.js("Object.fromEntries(Object.entries(LAWS).map(([name, x]) => [name, x[1]]))")
    for law in [*laws.values(), dict(a=0.3, b=-0.22, q=0.61)]:
        a, b, q = (law[name] for name in "abq")
        expected = {(shape, T, B): dumb_cost(runs, math.log(a * T**b * (B / 32) ** q))
                    for (shape, T, B), runs in cells.items()}  # fmt: skip
        costs = [cost for cost, _ in expected.values()]
        for at in browser.js(f"DATA.cells.map(cell => lookUp({law}, cell))"):
            cost, outside = expected.pop(tuple(at["cell"][x] for x in ("shape", "T", "batch")))
            found = at["outside"], at["cost"], sum(at["seeds"]) / 3
            assert found == pytest.approx((outside, cost, cost), abs=1e-6)
        found = browser.js(f"(s => [s.mean, s.worst.cost])(score({law}))")
        assert found == pytest.approx([sum(costs) / len(cells), max(costs)], abs=1e-6)
        assert expected == {}
    best = fit.law(records)
    for name in ("fit", "ours"):
        assert [f"{laws[name][x]:.3g}" for x in "abq"] == [f"{best[x]:.3g}" for x in "abq"]


def test_controls_work_by_keyboard_and_the_address_repeats_them(browser):
    browser.open(INDEX.as_uri())
    for slider in SLIDERS:
        before = browser.js(ALL)
        browser.press(f"$('{slider}')", key="ArrowLeft", windowsVirtualKeyCode=37)
        assert all(x != y for x, y in zip(before, browser.js(ALL))), slider
        assert browser.js(f"$('{slider}').ariaValueText === $('{slider}-value').textContent")
    for i in range(browser.js("document.querySelectorAll('button').length")):
        browser.press(f"document.querySelectorAll('button')[{i}]", key=" ", text=" ")
        assert browser.js("document.activeElement.ariaPressed ?? state.shown") in ("true", "3")
    box = "document.querySelector('td:nth-of-type(3) input')"
    browser.press(box, key="ArrowRight", windowsVirtualKeyCode=39)
    for label in ("document.activeElement.ariaLabel", "$('cell').innerText"):
        assert browser.js(label).startswith("width 128, T = 640k, batch size 2")
    print("ms:", browser.js("""['guess', 'b', 'q', 'stop'].map(id => { const t = performance.now();
        $(id).stepUp(); $(id).oninput(); document.body.offsetHeight; write();
        return Math.round(performance.now() - t); })"""))  # fmt: skip
    everything = browser.js(ALL)
    browser.open(INDEX.as_uri() + everything[1])
    assert browser.js(ALL) == everything
    trouble = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
    assert trouble.isdisjoint(browser.seen)


@pytest.mark.parametrize("width", [360, 1600])
def test_nothing_is_cut_off(browser, width):
    browser.open(INDEX.as_uri() + "#shown=123", width)
    boxes = SHOWN.format("body *") + ".map(x => x.getBoundingClientRect())"
    for question in (1, 2, 3):
        browser.js(f"change({{ question: {question}, stop: {10 * question} }})")
        assert browser.js(f"{boxes}.filter(b => b.left < 0 || b.right > {width})") == []


def test_only_a_bent_law_has_a_switch_and_its_sliders(browser, tmp_path):
    law = json.loads((page.FOLDER / "law.json").read_text(encoding="utf-8"))
    law["bent"] = dict(a=0.2, b0=-0.2, q=0.6, c=-3, kappa=0.2)
    (tmp_path / "law.json").write_text(json.dumps(law), encoding="utf-8")
    (tmp_path / "records.jsonl").symlink_to(page.FOLDER / "records.jsonl")
    (tmp_path / "index.html").write_text(page.page(tmp_path), encoding="utf-8")
    browser.open((tmp_path / "index.html").as_uri())
    sliders = SHOWN.format("[type=range]") + ".map(x => x.id)"
    assert browser.js(sliders) == SLIDERS
    browser.js("document.querySelector('#laws [value=bent]').click()")
    assert browser.js(sliders) == [*SLIDERS[:4], "beta_c", "kappa", *SLIDERS[4:]]
    for T, beta in ((8e4, 0.03), (3e6, 4)):
        lr = 0.2 * T**-0.2 * (1 + (math.exp(-3) * T**0.2 / beta) ** 2) ** -0.3
        assert 2 ** browser.js(f"log2Rate(state, {T}, {beta})") == pytest.approx(lr, rel=1e-4)
