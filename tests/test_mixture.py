"""Several corpora in one run: exact shares, one order, and nothing that moves it."""

import base64
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import model as model_file
import train
from test_resume import assert_same, everything, stop_after
from test_train import flags, metrics, read

SHARES = [(0.8, 0.2), (0.5, 0.5), (1 / 3, 1 / 3, 1 / 3), (0.7, 0.2, 0.07, 0.03), (0.99, 0.01), (1.0,), (0.0, 1.0), (0.1,) * 10]


@pytest.fixture(scope="session")
def sources(documents, tmp_path_factory) -> dict[str, str]:
    """Three corpora of sizes 150, 100 and 50 documents; the text of each begins in a way of its own."""
    folder = tmp_path_factory.mktemp("sources")
    for name, mark, part in (("web", "#", documents[:150]), ("code", "$", documents[150:250]), ("math", "%", documents[250:])):
        data.prepare([mark * 40 + text for text in part], "bytes", folder / name, val_fraction=0.1)
    return {name: str(folder / name) for name in ("web", "code", "math")}


# -- which source ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("first", [0, 10**10])
def test_every_window_has_its_shares(shares, first):
    for seed in (0, 1, 2**63 - 1):
        source, _ = data.mixed(first + np.arange(60_000), shares, seed)
        for j, share in enumerate(shares):
            count = np.cumsum(np.r_[0, source == j])
            for window in (100, 10_000):
                off = np.abs(count[window:] - count[:-window] - share * window).max()
                assert off <= 2 * len(shares) - 1 and (window < 10_000 or off <= 0.005 * window)


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_the_counts_are_those_of_a_loop(shares):
    g = np.arange(5000)
    source, before = data.mixed(g, shares, 7)
    counts = [0] * len(shares)
    for j, seen in zip(source.tolist(), before.tolist()):
        assert seen == counts
        counts[j] += 1
    some = np.array([4321, 17, 999])  # any of them alone, in any order
    assert (data.mixed(some, shares, 7)[0] == source[some]).all()


def test_no_source_has_a_place_in_the_batch():
    """With shares 3:1 and batches of 4, fixed turns would put one source on one rank for ever."""
    source, _ = data.mixed(np.arange(40_000), (0.75, 0.25), 0)
    for batch in (2, 4, 8):
        at = (source.reshape(-1, batch) == 1).mean(axis=0)
        assert np.abs(at - 0.25).max() < 4 * (0.25 * 0.75 * batch / 40_000) ** 0.5


def test_a_stage_goes_on_with_the_counts(sources):
    """Drawn sequences against a loop that counts, over two changes of the mixture."""
    mixture = data.load_corpus(
        f"{sources['web']}:0.6,{sources['code']}:0.4",
        stages=[(0, sources["web"]), (37, f"{sources['web']}:0.6,{sources['code']}:0.4"), (101, f"{sources['code']}:0.5,{sources['math']}:0.5")],
    )  # fmt: skip
    assert list(mixture.sources) == ["web", "code", "math"]
    names, read = list(mixture.sources), dict.fromkeys(mixture.sources, 0)
    together = data.draw(mixture, np.arange(200), 32, 5)
    for g in range(200):
        start, shares = next(stage for stage in reversed(mixture.stages) if stage[0] <= g)
        name = names[data.mixed(np.array([g - start]), shares, 5)[0][0]]
        tokens = mixture.sources[name].train
        i = data.shuffled(np.array([read[name]]), data.n_sequences(tokens, 32), 5)[0]
        read[name] += 1
        assert (together[0][g] == tokens[i * 32 : i * 32 + 32]).all() and (together[1][g] == tokens[i * 32 + 1 : i * 32 + 33]).all()
    assert read["math"] > 40 and data.sequences_read(mixture.stages, 200, 5).tolist() == list(read.values())
    epochs = data.epochs(mixture, 200, 32, 5)
    assert epochs == {name: pytest.approx(n / data.n_sequences(mixture.sources[name].train, 32)) for name, n in read.items()}


def test_a_branch_counts_what_its_parents_read_as_they_did(sources, monkeypatch):
    """Whatever order --data names the sources in: each in its own order, none of it twice or left out where the mixture changes."""
    web, code, math = sources.values()
    then, now = f"{web}:0.5,{code}:0.3,{math}:0.2", f"{math}:0.4,{code}:0.6"
    parent, branch = data.load_corpus(then), data.load_corpus(now, stages=[(0, then), (101, now)])
    assert list(branch.sources) == ["math", "code"] and branch.shares == (0.4, 0.6)
    seen = {}

    def reading(tokens, index, seq_len):
        seen[Path(tokens.filename).parent.name] += index.tolist()
        return np.zeros((2, len(index), seq_len), dtype=np.int64)

    monkeypatch.setattr(data, "read_sequences", reading)
    for seed in range(20):
        seen |= {name: [] for name in sources}
        data.draw(parent, np.arange(101), 32, seed)
        data.draw(branch, np.arange(101, 200), 32, seed)
        for name, corpus in parent.sources.items():
            assert len(seen[name]) > 15 and seen[name] == data.shuffled(np.arange(len(seen[name])), data.n_sequences(corpus.train, 32), seed).tolist()


def test_one_corpus_is_read_as_ever(corpus):
    """A corpus alone is a mixture of one: the order of runs that know of no mixtures."""
    g = np.arange(100, 164)
    n = data.n_sequences(corpus.train, 32)
    expected = data.read_sequences(corpus.train, data.shuffled(g, n, 3), 32)
    for one in (corpus, data.load_corpus(str(corpus.path)), data.load_corpus(f"{corpus.path}:1")):
        assert all((a == b).all() for a, b in zip(data.draw(one, g, 32, 3), expected))


# -- runs ------------------------------------------------------------------------------------------


def mixture(sources, **weights) -> str:
    return ",".join(f"{sources[name]}:{weight}" for name, weight in weights.items())


def watch(monkeypatch) -> list[bytes]:
    """The sequences that runs draw from now on, in the order of their numbers."""
    seen, real = [], data.draw

    def drawing(corpus, g, seq_len, seed):
        inputs, targets = real(corpus, g, seq_len, seed)
        seen.extend(row.astype(np.uint8).tobytes() for row in inputs)
        return inputs, targets

    monkeypatch.setattr(data, "draw", drawing)
    return seen


def test_two_stages(sources, tmp_path, monkeypatch, capsys):
    """The decay's mixture changes nothing before the decay, wherever a batch begins, and says what it read."""
    stage_1, stage_2 = mixture(sources, web=0.75, code=0.25, math=0), mixture(sources, web=0.25, code=0.25, math=0.5)
    seen, streams = watch(monkeypatch), {}
    for name, changed in {
        "plain": {}, "two": {"decay_data": stage_2}, "batch": {"decay_data": stage_2, "batch_size": 16, "micro_batch_size": 4},
    }.items():  # fmt: skip
        seen.clear()
        assert train.main(flags(stage_1, out=name, decay_tokens=10 * 256 - 8, **changed)) == 0
        streams[name] = list(seen)
    begin = 30 * 8 + 1  # the decay begins within sequence 240
    for name, stream in streams.items():
        assert len(stream) == 320 and stream[:begin] == streams["plain"][:begin], name
    assert streams["two"] == streams["batch"] != streams["plain"]
    assert sum(row.count(b"%%%") > 0 for row in streams["plain"]) == 0
    a, b = metrics(tmp_path / "plain"), metrics(tmp_path / "two")
    assert [line["loss"] for line in a[:30]] == [line["loss"] for line in b[:30]] and a[-1]["loss"] != b[-1]["loss"]

    record, text = read(tmp_path / "two" / "record.json"), capsys.readouterr().out
    assert data.parse_mixture(record["data"]) == data.parse_mixture(stage_1) and data.parse_mixture(record["decay_data"]) == data.parse_mixture(stage_2)
    model = model_file.load_model(tmp_path / "two")
    losses = {name: evaluation.validation_loss(model, data.open_corpus(Path(sources[name]))) for name in sources}
    for name, result in losses.items():
        assert record[f"val_loss_{name}"] == pytest.approx(result["val_loss"], rel=1e-5)
    assert record["val_loss"] == pytest.approx(0.75 * losses["web"]["val_loss"] + 0.25 * losses["code"]["val_loss"], rel=1e-5)
    assert record["val_bpb"] == pytest.approx(record["val_loss"] / np.log(2), rel=0.05)  # bytes, all but end-of-text
    assert metrics(tmp_path / "two", "val_loss_math")[-1]["val_loss_math"] == record["val_loss_math"]
    n_math = data.n_sequences(data.open_corpus(Path(sources["math"])).train, 32)
    assert record["epochs_math"] * n_math == pytest.approx(0.5 * 79, abs=2) and f"{record['epochs_math']:.2f} epochs of math" in text
    assert read(tmp_path / "plain" / "record.json")["fingerprint"] != record["fingerprint"]
    assert evaluation.main(["--model", "two", "--device", "cpu"]) == 0  # on each source
    out = capsys.readouterr().out
    assert all(sources[name] in out and f"{losses[name]['val_loss']:.4f}" in out for name in sources)


def test_stopped_and_resumed(sources, tmp_path, monkeypatch):
    argv = flags(mixture(sources, web=0.75, code=0.25), decay_data=mixture(sources, web=0.5, math=0.5), decay_tokens=10 * 256, save_every=1280)
    assert train.main([*argv, "--out", "whole"]) == 0
    for steps in (13, 20):  # in each stage
        with monkeypatch.context() as patch:
            stop_after(patch, steps, lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert train.main([*argv, "--out", "parts", "--resume"]) == 3
    assert train.main([*argv, "--out", "parts", "--resume"]) == 0
    assert_same(everything(tmp_path / "parts"), everything(tmp_path / "whole"))


def test_a_branch_with_a_decay_mixture_is_the_separate_run(sources, tmp_path):
    stage_1, stage_2 = mixture(sources, web=0.75, code=0.25), mixture(sources, web=0.5, math=0.5)
    assert train.main(flags(stage_1, out="trunk", decay_tokens=10 * 256)) == 0
    assert train.main(flags(stage_1, out="separate", decay_tokens=10 * 256, decay_data=stage_2)) == 0
    assert train.main(["--branch", "trunk", "--decay_data", stage_2, "--total_tokens", "10240", "--decay_tokens", "2560", "--out", "branch"]) == 0
    a, b = everything(tmp_path / "branch"), everything(tmp_path / "separate")
    assert all(torch.equal(w, b["model"][name]) for name, w in a["model"].items())
    assert a["record"]["fingerprint"] == b["record"]["fingerprint"]


def test_a_branch_onto_new_data(sources, tmp_path, monkeypatch):
    """A new source is read from its first sequence on, an old one goes on; and so does the branch of a branch."""
    seen, real = {"web": [], "code": [], "math": []}, data.read_sequences

    def reading(tokens, index, seq_len):
        if Path(tokens.filename).name == "train.bin":
            seen[Path(tokens.filename).parent.name] += index.tolist()
        return real(tokens, index, seq_len)

    monkeypatch.setattr(data, "read_sequences", reading)
    assert train.main(flags(sources["web"], out="a")) == 0
    del seen["web"][288:]  # the branch begins before the decay, after 288 of 320 sequences
    new = mixture(sources, web=0.25, code=0.75)
    assert train.main(["--branch", "a", "--data", new, "--total_tokens", "20480", "--out", "b"]) == 0
    assert len(seen["web"]) == pytest.approx(288 + 88, abs=2) and len(seen["web"] + seen["code"]) == 640
    for name, index in seen.items():  # each in its own order, without a gap
        n = data.n_sequences(data.open_corpus(Path(sources[name])).train, 32)
        assert index == data.shuffled(np.arange(len(index)), n, 0).tolist()
    record = read(tmp_path / "b" / "record.json")
    stages = lambda run: torch.load(max((tmp_path / run / "ckpt").iterdir()), weights_only=True)["stages"]
    past = [[0, sources["web"]], [9216, new]]
    assert stages("b") == past and record["data"] == new

    for path in (tmp_path / "b" / "ckpt").iterdir():  # killed before its first checkpoint: again from the parent
        path.unlink()
    (tmp_path / "b" / "record.json").unlink()
    assert train.main(["--out", "b", "--resume"]) == 0
    assert read(tmp_path / "b" / "record.json")["val_loss"] == record["val_loss"]

    assert train.main(["--branch", "b", "--total_tokens", "30720", "--out", "c"]) == 0  # longer, nothing else: its parent's past is its own
    assert stages("c") == past
    assert train.main(["--branch", "b", "--data", sources["math"], "--total_tokens", "30720", "--out", "d"]) == 0
    assert stages("d") == past + [[18432, sources["math"]]]


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--data", "web:0.8,code:0.1"], "add up to 1 and not to 0.9"),
        (["--data", "web:0.8,code"], "'code'"),
        (["--data", "web,code"], "'web'"),
        (["--data", "web:1.5,code:-0.5"], "'web:1.5'"),
        (["--data", "web:nan,code:0.5"], "'web:nan'"),
        (["--data", "web:0.5,other/web:0.5"], "the name web"),
        (["--data", ":0.5,web:0.5"], "':0.5'"),
        (["--data", "web:0.5,nowhere:0.5"], "nowhere"),
        (["--data", "web:0.5,words:0.5"], "words"),
        (["--data", "web", "--decay_data", "web:0.5"], "--decay_data"),
        (["--data", "web", "--decay_data", "nowhere"], "nowhere"),
        (["--data", "web", "--decay_data", "other/web"], "same name"),
        (["--data", "web", "--decay_data", "code", "--schedule", "constant"], "--decay_data"),
        (["--data", "web", "--decay_data", "code", "--decay_tokens", "0"], "--decay_data"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(argv, says, sources, tmp_path, capsys):
    for name, path in sources.items():
        (tmp_path / name).symlink_to(path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "web").symlink_to(sources["code"])
    (tmp_path / "words.tiktoken").write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    data.prepare(["some text"] * 99, "words.tiktoken", tmp_path / "words")
    small = [flag for flag in flags("", vocab_size=257) if not flag.startswith("--data")]
    assert train.main([*small, *argv]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and says in error, error
    assert not (tmp_path / "runs").exists()


# -- the committed comparison ----------------------------------------------------------------------


def test_the_readme_has_the_numbers_of_the_records():
    root = Path(__file__).parent.parent
    runs = [json.loads(line) for line in (root / "results" / "two-stage" / "records.jsonl").read_text().splitlines()]
    one, two = ([r for r in runs if (r["decay_data"] is not None) == later] for later in (False, True))
    assert [r["seed"] for r in one] == [r["seed"] for r in two] == [0, 1, 2]
    readme = (root / "README.md").read_text(encoding="utf-8")
    for name in ("torch", "library", "clean"):
        before, after = ([r[f"val_loss_{name}"] for r in some] for some in (one, two))
        differences = ", ".join(f"{b - a:+.3f}" for a, b in zip(before, after))
        assert f"| {name} | {np.mean(before):.3f} | {np.mean(after):.3f} | {differences} |" in readme
    for a, b in zip(one, two):  # the same run, but for the decay's mixture
        differing = {key for key in a if a[key] != b.get(key) and not key.startswith(("val_", "epochs_"))}
        assert differing <= {"decay_data", "out", "command", "fingerprint", "parent", "started", "seconds", "tokens_per_second", "git_commit"}
