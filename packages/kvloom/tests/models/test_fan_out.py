"""One forward pass that fills many caches: each is then as if it had read the prompt alone."""

from __future__ import annotations

import pytest
import torch
import zoo
from test_saved import CALIBRATED, FORMS, IDS, PROMPT, llama, step

import kvloom
from backends import by_reference
from kvloom.errors import CacheMisuse, NotFinite
from kvloom.hf.shared_pass import Follower, prefill_many
from sampling import slow_except

__all__ = ["llama"]
KIVI = "kivi:group=16,residual=32"
STEPS = (PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 2), (PROMPT + 2, 190), (190, 191)


def prompt(tokens: int, rows: int = 3) -> dict:
    return {name: x[:rows, :tokens] for name, x in IDS.items()}


@by_reference
def test_every_recipe_goes_on_as_if_it_had_read_the_prompt_alone(llama):
    model, calibration = llama
    forms = [f"{x},calibration={calibration}" if x in CALIBRATED else x for x in FORMS]
    leader, followers = kvloom.Cache(model, "full"), []
    followers = [Follower(kvloom.Cache(model, form)) for form in forms]
    logits, _ = prefill_many(model, leader, followers, **prompt(PROMPT))
    for form, follower in zip(["full", *forms], [Follower(leader), *followers], strict=True):
        apart = kvloom.Cache(model, form)
        with torch.no_grad():  # as `generate` does
            read = model(**prompt(PROMPT), past_key_values=apart, logits_to_keep=1).logits
        assert torch.equal(read[:, -1], logits), form
        assert follower.error is None
        for lo, hi in STEPS:
            one, other = (step(model, x, lo, hi) for x in (apart, follower.cache))
            assert torch.equal(one, other), form
        assert apart.nbytes == follower.cache.nbytes


@by_reference
@pytest.mark.parametrize("name", slow_except(sorted(zoo.CONFIGS), *zoo.OF_EACH_KIND))
def test_every_model(name):
    model = zoo.build(name)
    forms = [KIVI, "snapkv:tokens=20,window=8", "streaming:tokens=24,positions=renumbered"]
    if name in zoo.LEARNED:
        forms[-1] = "streaming:tokens=24"
    leader = kvloom.Cache(model, "full")
    followers = [Follower(kvloom.Cache(model, form)) for form in forms]
    prefill_many(model, leader, followers, **prompt(70))
    for form, follower in zip(forms, followers, strict=True):
        apart = kvloom.Cache(model, form)
        step(model, apart, 0, 70)
        for at in range(70, 75):
            one = step(model, follower.cache, at, at + 1)
            assert torch.equal(one, step(model, apart, at, at + 1)), form
        assert follower.cache.nbytes == apart.nbytes


def test_positions_that_some_alibi_models_round_are_read_apart():
    model = zoo.build("bloom")
    cache = kvloom.Cache(model, "h2o:tokens=20,positions=renumbered")
    follower = Follower(cache)
    prefill_many(model, kvloom.Cache(model, "full"), [follower], **prompt(70))
    assert follower.reads_alone
    assert follower.error is None
    assert cache.get_seq_length() == 70


@pytest.mark.parametrize("count", [1, 3])
def test_each_follower_has_the_seconds_of_passes_that_it_shares(count):
    """Regression: shared passes were subtracted once a follower, and prompts took less than 0 s."""
    model = zoo.build("llama-gqa")
    passes = []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    forms = [f"kvzip:tokens={40 + i}" for i in range(count)]
    followers = [Follower(kvloom.Cache(model, form)) for form in [*forms, KIVI]]
    leader = kvloom.Cache(model, "full")
    _, forward = prefill_many(model, leader, followers, lambda: len(passes), **prompt(70, 1))
    assert forward == followers[-1].seconds == 1
    assert {follower.seconds for follower in followers[:-1]} == {len(passes)}
    assert len(passes) > 1


def test_an_error_of_one_recipe_does_not_stop_the_others():
    model = zoo.build("llama-gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e8)  # too large for fp16 scales
    good, bad = Follower(kvloom.Cache(model, "h2o:tokens=20")), Follower(kvloom.Cache(model, KIVI))
    leader = kvloom.Cache(model, "full")
    prefill_many(model, leader, [bad, good], **prompt(70))
    assert isinstance(bad.error, NotFinite)
    assert bad.cache.get_seq_length() == bad.cache.nbytes == 0
    assert good.error is None
    assert leader.get_seq_length() == good.cache.get_seq_length() == 70


def test_a_failure_of_the_model_leaves_every_cache_empty(monkeypatch):
    model = zoo.build("llama-gqa")
    leader, follower = kvloom.Cache(model, "full"), Follower(kvloom.Cache(model, KIVI))

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[2].mlp, "forward", fail)
    with pytest.raises(KeyboardInterrupt):
        prefill_many(model, leader, [follower], **prompt(70))
    assert leader.nbytes == follower.cache.nbytes == 0
    monkeypatch.undo()
    prefill_many(model, leader, [follower], **prompt(70))
    assert follower.cache.get_seq_length() == 70


@by_reference
def test_a_cache_that_holds_tokens_is_refused():
    model = zoo.build("llama-gqa")
    used = kvloom.Cache(model, KIVI)
    step(model, used, 0, 70)
    with pytest.raises(CacheMisuse, match="holds tokens already"):
        prefill_many(model, kvloom.Cache(model, "full"), [Follower(used)], **prompt(70))
    assert used.get_seq_length() == 70


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-3}, {"num_hidden_layers": 4}])
def test_a_cache_of_another_model_is_refused(change):
    model, other = zoo.build("llama-gqa"), zoo.build("llama-gqa", **change)
    own, others = kvloom.Cache(model, "full"), kvloom.Cache(other, "full")
    for leader, follower in ((own, others), (others, own)):
        with pytest.raises(CacheMisuse, match="made for another model"):
            prefill_many(model, leader, [Follower(follower)], **prompt(70))
    assert own.nbytes == others.nbytes == 0


def test_a_follower_that_failed_reads_the_next_prompt():
    model = zoo.build("llama-gqa")
    weight = model.model.layers[1].self_attn.v_proj.weight
    follower = Follower(kvloom.Cache(model, KIVI))
    for factor, failed in ((1e8, True), (1e-8, False)):
        with torch.no_grad():
            weight.mul_(factor)
        prefill_many(model, kvloom.Cache(model, "full"), [follower], **prompt(70))
        assert (follower.error is not None) == failed
    assert follower.cache.get_seq_length() == 70


def test_a_follower_holds_the_bytes_of_a_cache_that_read_the_prompt_alone():
    model = zoo.build("llama-gqa")
    form = (
        "snapkv:tokens=40,window=8,compress_after=110"  # still exact, beside one that reads norms
    )
    follower, reader = (
        Follower(kvloom.Cache(model, x))
        for x in (form, "rotated:fraction=0.5,recent=8,compress_after=110")
    )
    prefill_many(model, kvloom.Cache(model, "full"), [follower, reader], **prompt(70))
    alone = kvloom.Cache(model, form)
    with torch.no_grad():
        model(**prompt(70), past_key_values=alone)
    assert reader.cache.nbytes > follower.cache.nbytes == alone.nbytes


@pytest.mark.parametrize("name", ["gpt2", "gpt-neo", "xglm"])
def test_padded_rows_at_learned_positions_are_read_apart(name):
    """Where positions are renumbered, the mask places them; the plain model counts padding."""
    model = zoo.build(name)
    recipe = "h2o:tokens=24,positions=renumbered"
    batch, alone = zoo.batch(), kvloom.Cache(model, recipe)
    kvloom.attach(model, "full")
    follower = Follower(kvloom.Cache(model, recipe))
    with torch.no_grad():
        model(**batch, past_key_values=alone)
        prefill_many(model, kvloom.Cache(model, "full"), [follower], **batch)
        ids, mask = (
            torch.tensor([[5]] * 3),
            torch.cat([batch["attention_mask"], torch.ones(3, 1)], 1),
        )
        want, got = (
            model(ids, attention_mask=mask, past_key_values=cache).logits
            for cache in (alone, follower.cache)
        )
    torch.testing.assert_close(got, want)


def test_a_prompt_with_an_image_is_shared():
    """What a score and a repetition read of it, too; and a misfit says why."""
    model = zoo.build_with_images("qwen2-vl")
    kvloom.attach(model, "full")
    recipes = [
        "snapkv:tokens=24,window=8",
        "kvzip:tokens=24,recent=8",
        "expected:tokens=24,recent=8",
    ]
    followers = [Follower(kvloom.Cache(model, recipe)) for recipe in recipes]
    prompt = zoo.image_prompt(model, 30, 20)
    with torch.no_grad():
        prefill_many(model, kvloom.Cache(model, "full"), followers, **prompt)
        for follower, recipe in zip(followers[:2], recipes, strict=False):
            alone = kvloom.Cache(model, recipe)
            model(**prompt, past_key_values=alone)
            for one, two in zip(alone.full_layers, follower.cache.full_layers, strict=True):
                assert torch.equal(*(x.cache.exact_tokens()[0] for x in (one, two)))
    assert [follower.error is None for follower in followers] == [True, True, False]
    assert "positions on several axes" in str(followers[2].error)
