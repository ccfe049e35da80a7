"""Several corpora in one run: exact shares, one order, and nothing that moves it."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import data
import eval as evaluation
import model as model_file
import train
from mixture import Mixture, mixed
from data import format_mixture, parse_mixture
from test_resume import assert_same, everything, stop
from test_train import flags as small, metrics, read, same, weights

SHARES = [
    (0.8, 0.2), (0.5, 0.5), (1 / 3, 1 / 3, 1 / 3), (0.7, 0.2, 0.07, 0.03), (0.99, 0.01), (1.0,),
    (0.0, 1.0), (0.1,) * 10, (0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05),
]  # fmt: skip


@pytest.fixture(scope="session")
def sources(documents, tmp_path_factory) -> dict[str, str]:
    """Corpora of 150, 100 and 50 documents; the text of each has its own mark."""
    folder, parts = (
        tmp_path_factory.mktemp("sources"),
        np.split(np.array(documents), [150, 250]),
    )
    for name, mark, part in zip(("web", "code", "math"), "#$%", parts):
        texts = [mark * 40 + text for text in part.tolist()]
        data.prepare(texts, "bytes", folder / name, val_fraction=0.1)
    return {name: str(folder / name) for name in ("web", "code", "math")}


def mixture(sources, **shares) -> str:
    return ",".join(f"{sources[name]}:{share}" for name, share in shares.items())


def named(shares) -> dict[str, float]:
    return {f"source {j}": share for j, share in enumerate(shares)}


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("first", [0, 10**10])
def test_every_stretch_has_its_shares(shares, first):
    """To within two sequences if there are two sources, five if there are more."""
    for seed in (0, 2**63 - 1):
        names, _ = mixed(first + np.arange(60_000), named(shares), seed)
        for name, share in named(shares).items():
            off = np.cumsum(np.r_[0, names == name]) - share * np.arange(60_001)
            assert off.max() - off.min() < (2 if len(shares) <= 2 else 5)


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_the_counts_are_those_of_a_loop(shares):
    names, counts = mixed(np.arange(5000), named(shares), 7)
    seen = dict.fromkeys(counts, 0)
    for g, name in enumerate(names):
        assert seen == {source: count[g] for source, count in counts.items()}
        seen[name] += 1
    some = np.array([4321, 17, 999])  # in any order, without the others
    assert (mixed(some, named(shares), 7)[0] == names[some]).all()


def test_no_source_has_a_fixed_place_in_the_batch():
    """With shares 3:1 and batches of 4, a fixed order would put one source on one rank for ever."""
    names, _ = mixed(np.arange(40_000), {"a": 0.75, "b": 0.25}, 0)
    for batch in (2, 4, 8):
        at = (names.reshape(-1, batch) == "b").mean(axis=0)
        assert np.abs(at - 0.25).max() < 4 * (0.25 * 0.75 * batch / 40_000) ** 0.5


def test_counts_continue_when_the_shares_change(sources):
    """Drawn sequences against a loop that counts, over two changes of the mixture."""
    assert format_mixture(parse_mixture("/a:0.6,/b:0.4")) == "/a:0.6,/b:0.4"
    now = mixture(sources, web=0.6, code=0.4)
    stages = [(0, sources["web"]), (37, now), (101, mixture(sources, code=0.5, math=0.5))]
    corpus = data.load_corpus(now, stages=stages)
    assert list(corpus.sources) == ["web", "code", "math"] and corpus.shares == (
        0.6,
        0.4,
        0,
    )
    read, (inputs, targets) = (
        dict.fromkeys(sources, 0),
        corpus.draw(np.arange(2600), 32, 5),
    )
    for g in range(2600):
        start, shares = next(stage for stage in reversed(corpus.stages) if stage[0] <= g)
        name = mixed(np.array([g - start]), shares, 5)[0][0]
        tokens = corpus.sources[name].train
        i = data.shuffled(np.array([read[name]]), data.n_sequences(tokens, 32), 5)[0]
        read[name] += 1
        assert (inputs[g] == tokens[i * 32 : i * 32 + 32]).all()
        assert (targets[g] == tokens[i * 32 + 1 : i * 32 + 33]).all()
    sizes = {
        name: data.n_sequences(source.train, 32)
        for name, source in corpus.sources.items()
    }
    assert corpus.epochs(2600, 32, 5) == {name: read[name] / sizes[name] for name in read}


def flags(text: str, **changed) -> list[str]:
    return small(text, **{"schedule": "wsd", "decay_tokens": 10 * 256} | changed)


def losses(run: str) -> list[float]:
    return [line["loss"] for line in metrics(Path(run))]


def record(run: str) -> dict:
    return read(Path(run, "record.json"))


def test_the_mixture_of_the_decay_changes_nothing_before_it(sources, monkeypatch):
    stage_1 = mixture(sources, web=0.75, code=0.25, math=0)
    stage_2 = mixture(sources, web=0.25, code=0.25, math=0.5)
    seen, streams = [], {}

    def watch(kind):
        real = kind.draw

        def drawing(*args):
            inputs, targets = real(*args)
            seen.extend(row.astype(np.uint8).tobytes() for row in inputs)
            return inputs, targets

        monkeypatch.setattr(kind, "draw", drawing)

    watch(Mixture)
    for name, changed in (("plain", {}), ("two", {"decay_data": stage_2})):
        seen.clear()
        assert (
            train.main(flags(stage_1, out=name, **changed | {"decay_tokens": 2552})) == 0
        )
        streams[name] = list(seen)
    begin = 30 * 8 + 1  # the decay begins within sequence 240
    for stream in streams.values():
        assert len(stream) == 320 and stream[:begin] == streams["plain"][:begin]
    assert streams["two"] != streams["plain"]
    assert not any(b"%%%" in row for row in streams["plain"])
    assert (
        losses("plain")[:30] == losses("two")[:30]
        and losses("plain")[-1] != losses("two")[-1]
    )

    two, model = record("two"), model_file.load_model(Path("two"))
    val_loss = {}
    for name, path in sources.items():
        val_loss[name] = evaluation.validation_loss(model, data.open_corpus(Path(path)))[
            "val_loss"
        ]
        assert two[f"val_loss_{name}"] == pytest.approx(val_loss[name], rel=1e-5)
    mean = 0.75 * val_loss["web"] + 0.25 * val_loss["code"]
    assert two["val_loss"] == pytest.approx(mean, rel=1e-5)
    assert record("plain")["fingerprint"] != two["fingerprint"]


def test_every_metric_is_averaged_over_a_mixture(sources, monkeypatch):
    """Also one that a fork adds."""
    real = train.validation_loss
    accuracy = {"web": 0.5, "code": 0.25}

    def with_accuracy(model, source, max_tokens):
        losses = real(model, source, max_tokens)
        return losses | {"accuracy": accuracy[source.path.name]}

    monkeypatch.setattr(train, "validation_loss", with_accuracy)
    web_and_code = mixture(sources, web=0.75, code=0.25)
    assert train.main(flags(web_and_code, out="run")) == 0
    assert record("run")["accuracy"] == 0.75 * 0.5 + 0.25 * 0.25


def test_a_branch_with_a_decay_mixture_is_the_separate_run(sources):
    """Also if it stops and resumes, before the decay and in it."""
    stage_1, stage_2 = (
        mixture(sources, web=0.75, code=0.25),
        mixture(sources, web=0.5, math=0.5),
    )
    assert train.main(flags(stage_1, out="trunk", save_every=15 * 256)) == 0
    assert train.main(flags(stage_1, out="separate", decay_data=stage_2)) == 0
    argv = [
        f"--branch=trunk/ckpt/{15 * 256:016d}.pt",
        "--decay_data",
        stage_2,
        "--resume",
    ]
    argv += ["--total_tokens=10240", "--decay_tokens=2560", "--out=branch"]
    stop(argv, 8)
    stop(argv, 12)  # 35 of 40 steps
    assert train.main(argv) == 0
    assert same(weights(Path("branch")), weights(Path("separate")))
    assert losses("branch") == losses("separate")[15:]
    assert record("branch")["fingerprint"] == record("separate")["fingerprint"]


def test_a_branch_onto_new_data_continues_the_old_source(sources):
    """Also if it stops and resumes, with a checkpoint or without."""
    assert train.main(flags(sources["web"], out="a", decay_tokens=1024)) == 0
    new = mixture(sources, web=0.25, code=0.75)  # the branch starts after 288 sequences
    argv = ["--branch=a", "--data", new, "--total_tokens=20480"]
    assert train.main([*argv, "--out=whole"]) == 0
    for name, share, before in (("web", 0.25, 288), ("code", 0.75, 0)):
        n = data.n_sequences(data.open_corpus(Path(sources[name])).train, 32)
        read = record("whole")[f"epochs_{name}"] * n
        assert read == pytest.approx(before + share * (640 - 288), abs=2)
    argv += ["--out=parts", "--resume"]
    stop(argv, 7)
    assert train.main(argv) == 0
    assert_same(everything(Path("parts")), everything(Path("whole")))
    shutil.rmtree("parts/ckpt")  # killed before its first: again from the parent
    Path("parts/record.json").unlink()
    assert train.main(["--out=parts", "--resume"]) == 0
    assert_same(everything(Path("parts")), everything(Path("whole")))
