"""The paper's models, defaults that follow from other fields, laws, and limits."""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path

import pytest

import config
import train
from config import make_config
from model import empty_model
from schedules import peak
from tools import flags
from tools.flags import UserError

# -- Presets -----------------------------------------------------------------------------

PAPER = {
    # m_width, m_emb, m_res, init_std, batch_size, tokens of decay, parameters, active
    # ones but embeddings
    "12M": (0.5, 1, 1, 0.02, 128, 3.2e9, 12_329_088, 6_037_632),
    "36M": (1, 1, 1, 0.02, 128, 3.2e9, 36_716_800, 24_133_888),
    "121M": (2, 1, 1, 0.02, 128, 3.2e9, 121_668_096, 96_502_272),
    "36M-power": (1, 12, 0.26, 0.1, 128, 3.2e9, 36_716_800, 24_133_888),
    "1B": (6, 12, 0.22, 0.1, 1024, 100e9, 1_208_083_968, 1_132_586_496),
    "1B-moe": (4, 12, 0.28, 0.1, 1024, 100e9, 1_334_625_280, 378_323_968),
    "PowerLM-3B": (8, 12, 0.22, 0.1, 1024, 250e9, 3_510_819_072, 3_397_572_864),
    "PowerMoE-3B": (6, 12, 0.22, 0.1, 1024, 500e9, 3_298_788_864, 807_372_288),
}


@pytest.mark.parametrize("preset", PAPER)
def test_presets_are_the_papers_tables(preset):
    cfg = make_config(preset=preset)
    *settings, parameters, active = PAPER[preset]
    found = [cfg.m_width, cfg.m_emb, cfg.m_res, cfg.init_std, cfg.batch_size]
    assert [*found, cfg.decay_tokens] == settings
    assert (cfg.d_head, cfg.seq_len, cfg.vocab_size) == (64, 4096, 49152)
    assert cfg.logits_scaling == cfg.m_width and cfg.attention_multiplier == 1 / 64
    model = empty_model(cfg)
    assert model.n_params() == parameters
    assert model.n_active_params() == active + cfg.vocab_size * cfg.n_embd
    # how they train
    assert (cfg.power_a, cfg.power_b, cfg.power_q, cfg.lr_max) == (4, -0.51, 1, 0.02)
    assert (cfg.beta1, cfg.beta2, cfg.adam_eps) == (0.9, 0.95, 1e-10)
    assert (cfg.weight_decay, cfg.grad_clip, cfg.warmup_tokens) == (0.1, 1, 10**9)


@pytest.mark.parametrize("preset", ["laptop", "laptop-moe"])
def test_laptop_presets_have_one_power_and_for_others_the_rate_of_their_law(preset):
    """A straight line starts above WSD, and both move with T and the batch size."""
    law = config.LAPTOP_LAW
    for T, batch_size in itertools.product((400_000, 3_200_000), (2, 32)):
        at = dict(preset=preset, total_tokens=T, batch_size=batch_size)
        cfg = make_config(**at)
        found = (cfg.power_a, cfg.power_b, cfg.power_q, cfg.lr_max, cfg.lr)
        assert found == (0.5059, -0.3, 0.5, 0.02, None)
        wsd = law.a * (batch_size / 32) ** law.q * T**law.b
        for schedule, share in [("wsd", 0.3), ("linear", 0), ("cosine", 0)]:
            lr = make_config(schedule=schedule, **at).lr
            assert lr == pytest.approx(wsd * peak(schedule, share), rel=1e-3)
    assert make_config(schedule="linear", lr=0.3).lr == 0.3
    # the longest run of the law, because it is not known yet how long this one is
    longest = make_config(schedule="wsd", total_tokens=5_120_000)
    assert make_config(schedule="wsd", minutes=5).lr == longest.lr


def test_a_dry_run_prints_the_learning_rate_and_leaves_nothing(corpus_path, capsys):
    """The paper's 0.0011."""
    typed = "--preset 36M --schedule wsd --total_tokens 10e12 --batch_size 1024"
    assert train.main([*typed.split(), f"--data={corpus_path}", "--dry_run"]) == 0
    assert re.search(r"^lr +0\.001104$", capsys.readouterr().out, re.M)
    assert list(Path().iterdir()) == []


# -- Fields that follow from others ------------------------------------------------------


def test_an_mlp_keeps_the_proportion_of_its_preset_at_any_width():
    """The presets have the widths of the paper. A typed width wins."""
    widths = {"laptop-moe": 160, "1B": 4096, "1B-moe": 512, "PowerLM-3B": 9216}
    for preset, n_ffn in widths.items():
        cfg = make_config(preset=preset)
        assert cfg.n_ffn == n_ffn
        half = make_config(preset=preset, n_embd=cfg.n_embd // 2, n_head=8)
        assert half.n_ffn == n_ffn // 2
        assert half.m_width == half.n_embd / half.base_width  # also if it is pinned
    assert make_config(preset="laptop-moe", n_embd=64, n_ffn=160).n_ffn == 160
    assert make_config(n_embd=64).n_ffn == 160  # 2.5, in a preset that says nothing


def test_a_run_that_decays_from_now_on_decays_from_now_on():
    assert config.length_with(0.3, 700_000) == 1_000_000
    for share in (0.1, 0.3, 0.5):
        cfg = make_config(schedule="wsd", decay_share=share, warmup_tokens=0)
        for seen in range(1024, 10**5, 1024):
            cfg.total_tokens = config.length_with(share, seen)
            assert cfg.decay_start == seen


# -- Settings of a law -------------------------------------------------------------------

PILOT = dict(  # a law of a pilot, with a text of its own and heads of 16
    a=0.5, b=-0.3, q=0.5, schedule="power", decay_share=0.3, first_n=1000,
    assumed=["b", "q"], measured=dict(total_tokens=[164_000, 164_000]),
    settings=dict(
        data="data/mine", fingerprint="0123", tokenizer="3f2a91c0d1e2.json",
        vocab_size=320, preset="laptop", base_width=64, init_std=0.1, m_emb=10,
        n_layer=2, n_embd=32, n_head=2, seq_len=128,
        batch_size=8, warmup_tokens=32_768, weight_decay=0.2, decay_shape="linear",
    ),
)  # fmt: skip


def test_a_law_brings_the_settings_of_its_runs_unless_typed():
    cfg = make_config(law=PILOT, total_tokens=2 * 10**7)
    assert vars(cfg).items() >= PILOT["settings"].items()
    assert (cfg.schedule, cfg.decay_share) == ("power", 0.3)
    assert (cfg.power_a, cfg.power_b, cfg.power_q) == (0.5, -0.3, 0.5)
    typed = dict(n_layer=3, n_embd=128, n_head=4, weight_decay=0.1, schedule="wsd")
    cfg = make_config(law=PILOT, total_tokens=2 * 10**7, **typed)
    assert vars(cfg).items() >= typed.items()
    assert cfg.attention_multiplier == 1 / 32  # for its heads of 32
    assert cfg.batch_size == 8 and cfg.warmup_tokens == 32_768
    # a law of lines has no share for a trunk
    lines = PILOT | dict(schedule="linear", decay_share=0.0)
    assert make_config(law=lines).schedule == "linear"
    assert make_config(law=lines, schedule="wsd").decay_share == 0.3
    # its text is another one, so data.with_corpus finds the fingerprint
    assert make_config(law=PILOT, data="data/moved").fingerprint is None


def test_a_typed_preset_keeps_its_sizes_under_a_law():
    preset = config.PRESETS["laptop-moe"]
    cfg = make_config(law=PILOT, preset="laptop-moe", total_tokens=2 * 10**7)
    for name in preset.keys() & config.SIZES:
        assert getattr(cfg, name) == preset[name], name
    assert (cfg.data, cfg.weight_decay, cfg.decay_shape) == ("data/mine", 0.2, "linear")
    assert (cfg.power_a, cfg.power_b) == (0.5, -0.3)


@pytest.mark.parametrize("typed, needed", [
    (dict(base_width=256), "--base_width 64"),
    (dict(preset="121M"), "--base_width 64 --init_std 0.1 --m_emb 10"),
    (dict(attention_multiplier=1 / 64), "--attention_multiplier 0.0625"),
])  # fmt: skip
def test_a_law_on_another_mup_base_is_refused(typed, needed):
    """It would mean other learning rates, here four times as high. It says what helps."""
    with pytest.raises(UserError, match=needed):
        make_config(law=PILOT, **typed)
    words = train.parse(shlex.split(needed))[0]
    make_config(law=PILOT, **typed | words)


def test_saved_settings_may_lack_a_new_field_but_have_none_that_we_do_not_know():
    cfg = make_config(preset="1B", n_layer=7, lr=0.5, seed=2**63 - 1)
    older = dataclasses.asdict(cfg)
    assert make_config(**older) == cfg
    for name in ("grad_clip", "m_emb"):  # the value of the class, and of the preset
        del older[name]
    assert make_config(**older) == cfg
    with pytest.raises(UserError, match="z_loss, zz"):
        make_config(**older, z_loss=0.1, zz=2)


# -- Mistakes ----------------------------------------------------------------------------

MISTAKES = [  # the first field is the one to name
    dict(lr=0.0), dict(lr=float("nan")), dict(beta2=1.0), dict(schedule="no"),
    dict(n_head=3), dict(n_kv_head=3),  # of a width of 128
    dict(n_expert_active=0, n_expert=4), dict(n_expert_active=2),
    dict(total_tokens=1000),  # less than a batch
    dict(warmup_tokens=3 * 10**5, decay_share=0.95),
    dict(minutes=1, schedule="cosine"), dict(total_tokens=None),
]  # fmt: skip


@pytest.mark.parametrize("fields", MISTAKES, ids=str)
def test_a_mistake_is_one_line_with_the_flag(fields):
    with pytest.raises(UserError) as error:
        make_config(**fields)
    assert f"--{next(iter(fields))} " in str(error.value)
    assert "\n" not in str(error.value)


# -- Flags -------------------------------------------------------------------------------


def test_every_field_is_a_flag_and_only_typed_flags_count():
    words = "--n_layer 2 --total_tokens 1.5B --compile --no-recompute --lr 1e-3 --out a"
    typed, _ = train.parse(words.split())
    expected = dict(n_layer=2, total_tokens=15 * 10**8, compile=True, recompute=False)
    assert typed == expected | dict(lr=1e-3, out="a")
    assert train.parse(flags.as_flags(typed).split())[0] == typed
    cfg = make_config(device="cpu", out="a b", compile=False)
    given = {name: x for name, x in vars(cfg).items() if x is not None}
    assert train.parse(shlex.split(flags.as_flags(given)))[0] == given
