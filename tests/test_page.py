"""The page to drag, in a headless Chromium, against fit.py, schedules.py and the records."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import fit
import page
import schedules

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
INDEX = page.ROOT / "docs/index.html"
SLIDERS = ["guess", "a", "b", "q", "T", "batch", "stop"]
SHOWN = "[...document.querySelectorAll('{}')].filter(x => x.checkVisibility())"
ALL = "[JSON.stringify(state), location.hash, document.body.innerHTML]"


class Browser:
    """A Chromium with one pipe for commands and another for answers."""

    def __init__(self, commands: int, answers: int):
        self.commands, self.answers, self.number = commands, os.fdopen(answers, "rb"), 0

    def do(self, method: str, **params) -> dict:
        self.number += 1
        call = dict(id=self.number, method=method, params=params) | self.session
        os.write(self.commands, json.dumps(call).encode() + b"\0")
        read = lambda: b"".join(iter(lambda: self.answers.read(1) or b"\0", b"\0"))
        while (message := json.loads(read())).get("id") != self.number:
            self.seen.append(message["method"])
        return message["result"]

    def open(self, url: str, width: int = 1000) -> None:
        self.session, self.seen = {}, []
        tab = self.do("Target.createTarget", url="about:blank")
        self.session = self.do("Target.attachToTarget", flatten=True, **tab)
        size = dict(width=width, height=740, deviceScaleFactor=1, mobile=width < 500)
        self.do("Emulation.setDeviceMetricsOverride", **size)
        (
            self.do("Runtime.enable"),
            self.do("Log.enable"),
            self.do("Page.navigate", url=url),
        )
        while self.js("document.readyState") != "complete":
            pass

    def js(self, code: str, **more):
        answer = self.do("Runtime.evaluate", expression=code, returnByValue=True, **more)
        assert "exceptionDetails" not in answer, (code, answer)
        return answer["result"].get("value")

    def press(self, element: str, **key) -> None:
        self.js(f"{element}.focus()")
        self.do("Input.dispatchKeyEvent", type="keyDown", **key)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no Chromium; install chromium or google-chrome (docs/extend.md)")
    (read, commands), (answers, write) = os.pipe(), os.pipe()
    flags = "--headless --no-sandbox --remote-debugging-pipe --user-data-dir=profile"
    script = (
        f"exec {CHROMIUM} {flags} 3<&{read} 4>&{write} 2>&-"  # Chromium expects 3 and 4
    )
    here = dict(cwd=tmp_path_factory.mktemp("browser"), pass_fds=(read, write))
    with subprocess.Popen(["bash", "-c", script], **here) as process:
        os.close(read), os.close(write)
        yield Browser(commands, answers)
        process.terminate()


def test_the_program_builds_the_committed_page_which_loads_nothing():
    text = INDEX.read_bytes()
    assert text == page.page().encode() and len(text) < 400_000
    assert not any(
        word in text for word in (b"src=", b"import", b"url(", b"<link", b"http")
    )


TITLE = "A learning rate to drag"
IMAGE = "<img src=x onerror=document.title='ran'>"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A page from a stranger's records, whose shapes and folder try to run code."""
    folder = tmp_path_factory.mktemp("stranger") / IMAGE
    folder.mkdir()
    shutil.copy(page.FOLDER / "law.json", folder)
    with open(folder / "records.jsonl", "w", encoding="utf-8") as file:
        for r in fit.read_records([page.FOLDER]):
            shape = f'{r["shape"]}"</script>{IMAGE}\u2028<!--<script>'
            file.write(json.dumps(r | {"shape": shape}) + "\n")
    text = page.page(folder)
    (built := folder.parent / "index.html").write_text(text, encoding="utf-8")
    return built


def test_no_markup_from_a_record_reaches_the_file(hostile):
    text, own = (path.read_text(encoding="utf-8") for path in (hostile, INDEX))
    for markup in ("<img", "<!--", "<script", "</script", "\u2028"):
        assert text.count(markup) == own.count(markup), markup


def test_markup_from_a_record_is_shown_and_does_not_run(hostile, browser):
    browser.open(hostile.as_uri())
    for i in range(browser.js("document.querySelectorAll('#widths button').length")):
        browser.press(
            f"document.querySelectorAll('#widths button')[{i}]", key="Enter", text="\r"
        )
        # onerror
        browser.js("new Promise(done => setTimeout(done, 100))", awaitPromise=True)
        assert browser.js("state.width") == browser.js(f"all('shape')[{i}]")
        assert browser.js("[document.title, document.images.length]") == [TITLE, 0]
    for where in ("widths", "cell", "about"):
        assert f"</script>{IMAGE}" in browser.js(f"$('{where}').textContent")
    assert f"results/{IMAGE}" in browser.js("$('about').textContent")
    assert not {"Runtime.exceptionThrown", "Log.entryAdded"} & {*browser.seen}


def test_schedules_are_those_of_schedules_py(browser):
    browser.open(INDEX.as_uri())
    for T, beta in [(4e9, 16), (8.25e9, 64), (16e9, 256), (32e9, 128)]:
        curves, grid = schedules.paper_curves(T, beta), [T * i / 80 for i in range(81)]
        flat = schedules.warmup(schedules.constant(schedules.best_lr(T, beta)), 1e9)
        curves["linear"] = schedules.decay(flat, T, T - 1e9, "linear")
        found = browser.js(f"Object.entries(schedules({T}, {beta})).map(([name, f]) => "
                           f"[name.toLowerCase(), {grid}.map(f)])")  # fmt: skip
        expected = {
            name: [schedule(n) for n in grid] for name, schedule in curves.items()
        }
        assert dict(found) == {
            x: pytest.approx(expected[x], 1e-9, 1e-15) for x in expected
        }


def cost_of(runs: list[dict], log_lr: float) -> tuple[float, int]:
    """Loss at this learning rate minus the lowest measured, and -1 or 1 outside."""
    losses, n = {}, len({r["seed"] for r in runs})
    for r in runs:
        losses.setdefault(math.log(r["lr"]), []).append(r["val_loss"])
    x, y = np.array(sorted((x, np.mean(y)) for x, y in losses.items() if len(y) == n)).T
    return np.interp(log_lr, x, y) - min(y), int(log_lr > x[-1]) - int(log_lr < x[0])


def test_costs_are_those_of_the_records_and_fit_is_that_of_fit_py(browser, monkeypatch):
    (records, _, ours), cells = page.measured(page.FOLDER), {}
    for r in records:
        cells.setdefault((r["shape"], r["total_tokens"], r["batch_size"]), []).append(r)
    browser.open(INDEX.as_uri())
    looked_up = (
        "({ law, score: score(law), cells: DATA.cells.map(cell => lookUp(law, cell)) })"
    )
    for found in browser.js(f"Object.values(LAWS).map(([, law]) => {looked_up})"):
        (a, b, q), costs = (found["law"][name] for name in "abq"), []
        for at in found["cells"]:
            shape, T, B = (at["cell"][name] for name in ("shape", "T", "batch"))
            cost, outside = cost_of(
                cells[shape, T, B], math.log(a * T**b * (B / 32) ** q)
            )
            costs.append(cost)
            here = at["outside"], at["cost"], np.mean(at["seeds"])
            assert here == pytest.approx((outside, cost, cost), abs=1e-6)
        assert found["score"]["mean"] == pytest.approx(sum(costs) / len(cells), abs=1e-6)
    for key, law in (("fit", fit.law(records)), ("ours", ours)):
        found = browser.js(f"LAWS.{key}[1]")
        assert [f"{found[name]:.3g}" for name in "abq"] == [
            f"{law[name]:.3g}" for name in "abq"
        ]


def test_controls_work_by_keyboard_and_the_address_repeats_them(browser):
    browser.open(INDEX.as_uri())
    for slider in SLIDERS:
        before = browser.js(ALL)
        browser.press(f"$('{slider}')", key="ArrowLeft", windowsVirtualKeyCode=37)
        assert all(x != y for x, y in zip(before, browser.js(ALL))), slider
    for i in range(browser.js("document.querySelectorAll('button').length")):
        browser.press(f"document.querySelectorAll('button')[{i}]", key="Enter", text="\r")
        assert browser.js("document.activeElement.ariaPressed ?? state.shown") in (
            "true",
            "3",
        )
    box = "document.querySelector('td:nth-of-type(3) input')"
    browser.press(box, key="ArrowRight", windowsVirtualKeyCode=39)
    assert browser.js("document.activeElement.ariaLabel").startswith(
        "width 128, T = 640k"
    )
    everything = browser.js(ALL)
    browser.open(INDEX.as_uri() + everything[1])
    assert browser.js(ALL) == everything
    assert not {"Runtime.exceptionThrown", "Log.entryAdded"} & {*browser.seen}


def test_nothing_is_cut_off(browser):
    boxes = SHOWN.format("body *") + ".map(x => x.getBoundingClientRect())"
    for width, question in [(360, 1), (360, 2), (360, 3), (1600, 1)]:
        browser.open(
            INDEX.as_uri() + f"#shown=123&question={question}&stop={9 * question}", width
        )
        assert browser.js(f"{boxes}.filter(b => b.left < 0 || b.right > {width})") == []


def test_ci_says_which_tests_it_skipped_and_what_they_need(tmp_path):
    (options,) = re.findall(
        "PYTEST_ADDOPTS=(.+?)  #", (page.ROOT / ".ci/run").read_text("utf-8")
    )
    # so without Chromium
    env = os.environ | {
        "PATH": str(tmp_path),
        "PYTEST_ADDOPTS": options,
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "cut_off",
    ]
    run = subprocess.run(command, env=env, cwd=page.ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and re.search(
        r"^SKIPPED .+: no Chromium; install", run.stdout, re.M
    )
    assert "google-chrome" in (page.ROOT / "docs/extend.md").read_text("utf-8")
