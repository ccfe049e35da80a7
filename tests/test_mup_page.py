"""docs/mup.md: every block is run with transformers, and without a rule the check fails."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import mup
from config import make_shape
from model import GPT
from test_elsewhere import NEW, for_steps, rates, recipe, seen  # noqa: F401
from tools.granite import granite_name

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/mup.md").read_text(encoding="utf-8")
NUMBER = r"[+-]\d\.\d\d"
LLAMA_SPOTS = ["self_attn", "mlp"]


@pytest.fixture(scope="module")
def page():
    """The names that the blocks define, and pairs of printed and shown output."""
    names, outputs = {}, []
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(text, names)
        elif language == "text":
            outputs.append((printed.getvalue(), text))
    return names, outputs


def steep(model_at, spots) -> set[str]:
    """Spots whose change the check refuses, with one seed."""
    slopes = mup.coordinate_check(model_at, spots, seeds=(0,))
    return {spot for spot, s in slopes.items() if abs(s.change) > mup.STEEPEST}


def test_the_checks_print_what_the_page_shows(page):
    _names, outputs = page
    assert len(outputs) == 3
    for printed, shown in outputs:
        assert re.sub(NUMBER, "N", printed) == re.sub(NUMBER, "N", shown)
        numbers = [
            [float(x) for x in re.findall(NUMBER, text)] for text in (printed, shown)
        ]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.05)


def test_the_verdicts_of_the_page_have_margins(page):
    """A verdict must not hang on the last digit, which a processor may change."""
    _names, outputs = page
    row = rf"^  (\w+) +{NUMBER} +({NUMBER})$"
    for printed, _shown in outputs:
        changes = {spot: float(x) for spot, x in re.findall(row, printed, re.M)}
        if "Llama groups" in printed:
            assert changes.pop("logits") >= 0.6
        assert all(abs(x) <= 0.22 for x in changes.values()), printed


def test_untied_heads_need_wider_models(page, monkeypatch):
    """The two slopes of the logits that the page tells."""
    names, _outputs = page
    shape = names["shape"]
    untied = lambda width: shape(width) | dict(tie_word_embeddings=False)
    monkeypatch.setitem(names, "shape", untied)
    told = re.search(rf"slope of the logits is ({NUMBER}), and ({NUMBER}) at", PAGE)
    for widths, number in zip((mup.WIDTHS, (64, 128, 256, 512)), told.groups()):
        slopes = mup.coordinate_check(names["granite_at"], LLAMA_SPOTS, widths)
        assert slopes["logits"].change == pytest.approx(float(number), abs=0.03)


def test_without_a_rule_the_check_fails(page, monkeypatch):
    names, _outputs = page

    def gpt2_groups_only(width):
        config = transformers.GPT2Config(
            n_embd=width,
            n_layer=2,
            n_head=width // 16,
            vocab_size=64,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = transformers.GPT2LMHeadModel(config)
        return names["under_mup"](model, width / 32, names["GPT2"])

    assert steep(gpt2_groups_only, ["attn", "mlp"]) == {"logits"}

    granite_at = names["granite_at"]
    monkeypatch.setattr(mup, "init_weights", lambda *_: None)  # transformers' own
    assert steep(granite_at, LLAMA_SPOTS) == {"self_attn", "mlp"}
    monkeypatch.undo()

    def same_learning_rate(width):
        model, groups = granite_at(width)
        return model, [group | {"lr": 1.0} for group in groups]

    assert steep(same_learning_rate, LLAMA_SPOTS) >= {"self_attn", "mlp"}


MULTIPLIERS = dict(m_width=3.0, m_emb=5.0, m_res=0.3)


@torch.no_grad()
def shaken(model):
    """The model in eval mode, with random weights, gains and biases."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.add_(0.2 * torch.randn_like(p))
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(torch.arange(40).view(2, 20)).logits


@pytest.mark.parametrize("tied", [True, False])
def test_llama_with_the_lines_is_granite(tied, page):
    names, _outputs = page
    shape = names["shape"](64) | dict(tie_word_embeddings=tied, num_key_value_heads=2)
    granite = transformers.GraniteForCausalLM(transformers.GraniteConfig(
        **shape, attention_multiplier=1 / 16, logits_scaling=3.0, embedding_multiplier=5.0,
        residual_multiplier=0.3,
    ))  # fmt: skip
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    llama.load_state_dict(shaken(granite).state_dict())  # the same names
    assert not torch.allclose(logits(llama.eval()), logits(granite), rtol=0.1)
    names["add_multipliers_to_llama"](llama, **MULTIPLIERS)
    assert torch.allclose(logits(llama), logits(granite), rtol=1e-4, atol=1e-5)


def test_gpt2_with_the_lines_has_the_multipliers(page):
    """The oracle has the multipliers in its weights, which an untied model allows."""
    names, _outputs = page
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=64, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    plain = shaken(transformers.GPT2LMHeadModel(config))
    hooked = transformers.GPT2LMHeadModel(config).eval()
    hooked.load_state_dict(plain.state_dict())
    names["add_multipliers_to_gpt2"](hooked, **MULTIPLIERS)
    with torch.no_grad():
        plain.transformer.wte.weight *= 5.0
        plain.transformer.wpe.weight *= 5.0
        for block in plain.transformer.h:
            block.attn.c_attn.weight[:, :64] *= 16**0.5 / 16  # the queries
            block.attn.c_attn.bias[:64] *= 16**0.5 / 16
            for module in (block.attn.c_proj, block.mlp.c_proj):
                module.weight *= 0.3
                module.bias *= 0.3
        plain.transformer.ln_f.weight /= 3.0
        plain.transformer.ln_f.bias /= 3.0
    assert torch.allclose(logits(hooked), logits(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_granite_gets_the_groups_of_our_model(tied, page):
    """For every weight, the same role, learning rate and weight decay, and the same start."""
    names, _outputs = page
    shape = names["shape"](64) | dict(tie_word_embeddings=tied)
    config = transformers.GraniteConfig(**shape)
    theirs, groups = names["under_mup"](
        transformers.GraniteForCausalLM(config), 4.0, names["LLAMA"]
    )
    cfg = make_shape(
        n_layer=2, n_embd=64, n_head=4, n_ffn=256, vocab_size=64, seq_len=8,
        tie_embeddings=tied, base_width=16,
    )  # fmt: skip
    ours = GPT(cfg)

    def by_name(model, groups):
        name_of = {p: name for name, p in model.named_parameters()}
        return {
            name_of[p]: (group["role"], group["lr"], group["weight_decay"], p.shape)
            for group in groups
            for p in group["params"]
        }

    expected = by_name(ours, mup.param_groups(ours, mup.rules(cfg), weight_decay=0.1))
    found = by_name(theirs, groups)
    assert found == {granite_name(name): group for name, group in expected.items()}
    theirs = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        q = theirs[granite_name(name)]
        if p.dim() > 1:
            assert q.std().item() == pytest.approx(p.std().item(), rel=0.05)
        else:
            assert torch.equal(p, q)


def test_roles_of_gpt2_cover_weights_biases_and_no_more(page):
    names, _outputs = page
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    model, groups = names["under_mup"](
        transformers.GPT2LMHeadModel(config), 2.0, names["GPT2"]
    )
    assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name  # init_weights left them at 0
    for group in groups:
        assert (group["weight_decay"] == 0) == all(p.dim() == 1 for p in group["params"])


def test_a_name_without_a_role_and_a_spot_without_a_module_are_named(page):
    names, _outputs = page
    model, _groups = names["granite_at"](32)
    with pytest.raises(KeyError, match="your map: embed_tokens, q_proj"):
        names["under_mup"](model, 1.0, names["GPT2"])
    with pytest.raises(ValueError, match="no module is called 'attention'"):
        mup.coordinate_check(names["granite_at"], ["attention"])


def test_the_trainer_takes_the_groups(page, seen, monkeypatch):  # noqa: F811
    """Every step of transformers' Trainer has the learning rates of Power times those of muP."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names, _outputs = page
    model, groups = names["granite_at"](64)
    scales = [group["lr"] for group in groups]
    assert scales == [1, 1 / 2, 1 / 2, 1]
    tokens = torch.arange(16) % 64
    args = transformers.TrainingArguments(
        "out", max_steps=NEW, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    code = recipe("Trainer")
    plain = "AdamW(model.parameters(), lr=1.0, weight_decay=0.1)"
    assert plain in code
    exec(code.replace(plain, "AdamW(groups)"), for_steps(
        NEW, model=model, groups=groups, args=args, checkpoint=None,
        dataset=[{"input_ids": tokens, "labels": tokens}] * 4 * NEW,
    ))  # fmt: skip
    assert seen == [[lr * scale for scale in scales] for lr in rates(NEW)]


def test_nan_fails(capsys):
    assert not mup.report("mine", {"logits": mup.Slopes(0.0, float("nan"))})
    assert capsys.readouterr().out.endswith("in logits\n")


def test_dropout_is_off(page):
    """Without a step nothing changes, and the page's GPT-2 has dropout."""
    names, _outputs = page
    spots = ["attn", "mlp"]
    before, after, model = mup.train_a_little(
        names["gpt2_at"], 32, spots, seed=0, steps=0
    )
    assert model.config.resid_pdrop > 0
    for spot in (*spots, "logits"):
        assert torch.equal(before[spot], after[spot])


def test_groups_without_lr_have_the_multiplier_1(page):
    names, _outputs = page

    def plain(width):
        model, _groups = names["granite_at"](width)
        return model, [{"params": [*model.parameters()], "weight_decay": 0.1}]

    def with_lr(width):
        model, groups = plain(width)
        return model, [group | {"lr": 1.0} for group in groups]

    _before, after, _model = mup.train_a_little(plain, 32, [], seed=0)
    _before, expected, _model = mup.train_a_little(with_lr, 32, [], seed=0)
    assert torch.equal(after["logits"], expected["logits"])
