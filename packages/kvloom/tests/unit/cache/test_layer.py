"""LayerCache: what it refuses, that a refusal changes nothing, and that steps copy nothing."""

from __future__ import annotations

import pytest
import torch

import probe
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.errors import CacheMisuse, NotFinite
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from kvloom.store import Format, Packed, Store
from kvloom.store.buffer import Buffer
from steps import RECIPES, SCALE, assert_same_state, build, core_recipes, draw, feed, state


def attend(cache: LayerCache, q, k, v, **options):
    return cache.attend(q, k, v, scale=SCALE, **options)


def refuses(cache: LayerCache, error: type, call) -> str:
    """The one sentence that `call` is refused with; the cache is as if never called."""
    before, nbytes = state(cache), cache.nbytes
    with pytest.raises(error) as refused:
        call()
    assert_same_state(state(cache), before)
    assert cache.nbytes == nbytes
    assert "\n" not in str(refused.value)
    return str(refused.value)


def goes_on_like(cache: LayerCache, other: LayerCache, **shape) -> None:
    """Both caches answer the same from here on."""
    new = draw(99, 5, **shape)
    assert torch.equal(feed(cache, *new, [1, 4]), feed(other, *new, [1, 4]))


# --- misuse --------------------------------------------------------------------------------------

OTHERS = {
    "batch size": ({"batch": 3}, ["batch size 2", "given 3"]),
    "key/value heads": ({"hk": 1}, ["key/value heads 2", "given 1"]),
    "head dimension": ({"dim": 64}, ["head dimension 32", "given 64"]),
    "dtype": ({"dtype": torch.bfloat16}, ["dtype torch.float32", "given torch.bfloat16"]),
}


@pytest.mark.sample
@core_recipes
@pytest.mark.parametrize(("change", "says"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("t", [1, 70])
def test_a_cache_refuses_what_is_not_its_models(recipe, change, says, t):
    shape = {"batch": 2, "hq": 4, "hk": 2}
    q, k, v = draw(0, 50, **shape)
    cache, same = build(recipe, q, k, v, name="layer 7"), build(recipe, q, k, v)
    change = dict(change)
    dtype = change.pop("dtype", torch.float32)
    other = [x.to(dtype) for x in draw(1, t, **shape | change)]
    message = refuses(cache, CacheMisuse, lambda: attend(cache, *other))
    assert message.startswith("layer 7: ")
    assert all(words in message for words in says)
    assert "make a new cache" in message
    goes_on_like(cache, same, **shape)


@pytest.mark.parametrize("name", ["full", "kivi:residual=32"])
@pytest.mark.parametrize("t", [1, 70])
@pytest.mark.parametrize("what", ["dtype", "heads", "head dimension", "batch", "tokens"])
def test_values_are_checked_as_keys_are(name, t, what):
    cache, same = (build(resolve(name), *draw(0, 50, batch=2, hk=2)) for _ in range(2))
    q, k, v = draw(1, t, batch=2, hk=2)
    wrong = {
        "dtype": v.bfloat16(),
        "heads": v[:, :1],
        "head dimension": v[..., :16],
        "batch": v[:1],
        "tokens": torch.cat([v, v], dim=2),
    }
    refuses(cache, CacheMisuse, lambda: attend(cache, q, k, wrong[what]))
    goes_on_like(cache, same, batch=2, hk=2)


@pytest.mark.parametrize("name", ["full", "kivi:residual=32", "streaming:tokens=20"])
@pytest.mark.parametrize("t", [1, 70])
def test_a_step_that_fails_leaves_nothing_behind(name, t, monkeypatch):
    cache, same = (build(resolve(name), *draw(0, 50)) for _ in range(2))

    def out_of_memory(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvloom.cache.cycle.attend_to", out_of_memory)
        with pytest.raises(MemoryError):
            attend(cache, *draw(1, t))
    assert_same_state(state(cache), state(same))
    goes_on_like(cache, same)


@core_recipes
def test_no_tokens_are_refused(recipe):
    for cache in (LayerCache(recipe), build(recipe, *draw(0, 40))):
        message = refuses(cache, CacheMisuse, lambda c=cache: attend(c, *draw(0, 0)))
        assert "at least one" in message


def test_after_a_reset_another_model_is_welcome():
    cache = build(resolve("kivi"), *draw(0, 40))
    cache.reset()
    new = draw(1, 30, batch=3, hq=4, hk=4, dim=64)
    goes_on_like(cache, LayerCache(resolve("kivi")), batch=3, hq=4, hk=4, dim=64)
    assert attend(LayerCache(resolve("kivi")), *new).shape == (3, 4, 30, 64)


# --- numbers that are none -----------------------------------------------------------------------


@pytest.mark.sample
@core_recipes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("t", [1, 9, 70])
def test_nan_and_infinity_are_refused_by_layer_and_side(recipe, bad, side, t):
    q, k, v = draw(0, 50, batch=2)
    for cache, same in (
        (build(recipe, q, k, v, name="layer 3"), build(recipe, q, k, v)),
        (LayerCache(recipe, "layer 3"), LayerCache(recipe)),
    ):
        spoilt = draw(1, t, batch=2)
        spoilt[1 if side == "keys" else 2][1, 0, t // 2, 5] = bad
        message = refuses(cache, NotFinite, lambda c=cache, x=spoilt: attend(c, *x))
        assert message.startswith(f"layer 3: NaN or infinity in {side}")
        goes_on_like(cache, same, batch=2)


def test_numbers_too_large_for_the_metadata_are_refused_with_the_remedy():
    for side, name in ((1, "keys"), (2, "values")):
        large = draw(0, 40)
        large[side][0, 0, 3, 3] = 1e5
        cache = LayerCache(resolve("kivi:group=16"), "layer 0")
        message = refuses(cache, NotFinite, lambda c=cache, x=large: attend(c, *x))
        assert message.startswith("layer 0: |x| > 65504 in " + name)
        assert 'use meta="bf16"' in message
        for fits in ("kivi:meta=bf16", "kivi:meta=fp32", "full"):
            out = feed(LayerCache(resolve(fits)), *(torch.cat([x] * 5, dim=2) for x in large))
            assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("kivi:meta=fp8", 448),
        ("rtn:meta=fp8,bits=1", 224),
        ("rtn:meta=fp16,bits=1", 32752),
        ("kivi:rotate=true", 2047),
        ("rtn:rotate=true,meta=fp8", 448),
    ],
)
def test_what_the_metadata_can_hold_depends_on_its_dtype_and_the_highest_code(name, limit):
    x = torch.full((1, 1, 40, 32), float(limit))
    x[:, :, ::2, ::2] *= -1
    held = build(resolve(name), torch.zeros_like(x), x, x)
    assert torch.isfinite(attend(held, *torch.zeros(3, 1, 1, 1, 32))).all()
    with pytest.raises(NotFinite, match=rf"\|x\| > {limit} in keys; use meta=\"bf16\""):
        build(resolve(name), torch.zeros_like(x), x * 1.01, x)


class UpToTen(Format):
    max_abs = 10.0


@pytest.mark.parametrize(
    ("fmt", "large"), [(UpToTen(), 11.0), (Packed(1, "token", 16, "bf16"), 3e38)]
)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_no_other_metadata_is_advised_where_a_format_has_none_that_holds_more(fmt, large, side):
    q, k, v = (torch.full((1, 1, 20, 32), x) for x in (0.0, 1.0, 1.0))
    (k if side == "keys" else v)[0, 0, 3, 3] = large
    cache = LayerCache(Recipe(store=Store(**{side: fmt})))
    message = refuses(cache, NotFinite, lambda: attend(cache, q, k, v))
    assert f"in {side}; use recipe full" in message


def test_the_largest_numbers_that_are_let_in_come_back_finite():
    x = torch.full((1, 1, 64, 32), 65504.0)
    x[:, :, ::2] *= -1
    x[:, :, :, ::2] *= -1
    for name in ("kivi:residual=32", "rtn", "kivi:bits=8,residual=32,meta=bf16"):
        cache = build(resolve(name), torch.zeros_like(x), x, x)
        out = attend(cache, *torch.zeros(3, 1, 1, 1, 32))
        assert torch.isfinite(out).all()


# --- crop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kivi:residual=32", "rtn"])
def test_crop_into_packed_tokens_is_refused(name):
    cache = build(resolve(name), *draw(0, 70))
    exact = probe.tokens(cache).exact_newest
    message = refuses(cache, CacheMisuse, lambda: cache.crop(exact + 1))
    assert f"crop of {exact + 1} tokens reaches into packed tokens" in message
    assert f"the newest {exact} are still exact" in message
    cache.crop(exact)
    assert cache.seen == 70 - exact


def test_crop_of_an_exact_cache_is_free():
    q, k, v = draw(0, 70)
    cache = build(resolve("full"), q, k, v)
    cache.crop(30)
    assert_same_state(
        state(cache), state(build(resolve("full"), *(x[:, :, :40] for x in (q, k, v))))
    )
    cache.crop(0)
    assert cache.seen == 40


@pytest.mark.parametrize("name", ["window:tokens=20", "streaming:tokens=20,sinks=4"])
def test_crop_after_tokens_were_dropped_is_refused(name):
    cache = build(resolve(name), *draw(0, 70))
    message = refuses(cache, CacheMisuse, lambda: cache.crop(1))
    assert "activate_past_recording()" in message
    cache.crop(0)
    cache.crop(70)
    assert (cache.seen, cache.nbytes) == (0, 0)
    within = build(resolve(name), *draw(0, 15))
    within.crop(5)
    assert within.seen == 10


@pytest.mark.parametrize("name", ["window:tokens=20", "streaming:tokens=20,sinks=4"])
@pytest.mark.parametrize("after", ["nothing", "a step", "a long step"])
def test_recording_allows_to_crop_what_was_recorded_and_no_more(name, after):
    cache = build(resolve(name), *draw(0, 70))
    probe.record(cache, True)
    feed(cache, *draw(1, 4))
    if after != "nothing":  # not recording any more: the draft was accepted, older tokens dropped
        probe.record(cache, False)
        feed(cache, *draw(2, 1 if after == "a step" else 100))
    refuses(cache, CacheMisuse, lambda: cache.crop(5 if after == "nothing" else 2))
    if after == "nothing":
        cache.crop(4)
        assert cache.seen == 70


# --- steps ---------------------------------------------------------------------------------------


@core_recipes
def test_decoding_reallocates_rarely(recipe, monkeypatch):
    counts = {"moves": 0}
    make_room, replace = Buffer._make_room, Buffer.replace

    def counted(original):
        def call(self, *args):
            counts["moves"] += 1
            original(self, *args)

        return call

    q, k, v = draw(0, 500)
    cache = build(recipe, *(x[:, :, :300] for x in (q, k, v)))
    monkeypatch.setattr(Buffer, "_make_room", counted(make_room))
    monkeypatch.setattr(Buffer, "replace", counted(replace))
    feed(cache, *(x[:, :, 300:] for x in (q, k, v)), [1] * 200)
    # at most every 16 steps, for each of up to eight buffers
    assert counts["moves"] <= 8 * (1 + 200 / 16)


def test_decoding_never_concatenates_what_is_held(monkeypatch):
    """No per-step torch.cat of the cache: only the codes of a pack block that is not full yet."""
    q, k, v = draw(0, 400)
    caches = [build(r, *(x[:, :, :300] for x in (q, k, v))) for r in RECIPES.values()]
    longest = []
    cat = torch.cat

    def counted(tensors, *args, **options):
        out = cat(tensors, *args, **options)
        longest.append(out.shape[2] if out.dim() > 2 else 0)
        return out

    monkeypatch.setattr("kvloom.store.packed.torch.cat", counted)
    for cache in caches:
        for i in range(300, 400):
            attend(cache, *(x[:, :, i : i + 1] for x in (q, k, v)))
    assert max(longest, default=0) <= 128  # a residual, never the cache


@core_recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_have_the_queries_shape_and_dtype(recipe, dtype):
    cache = LayerCache(recipe)
    for t in (40, 1, 3, 70, 1):
        q, k, v = (x.to(dtype) for x in draw(t, t, batch=2, hq=4, hk=2))
        out = attend(cache, q, k, v)
        assert out.dtype == dtype
        assert out.shape == q.shape
        assert torch.isfinite(out).all()


@core_recipes
def test_inputs_are_neither_changed_nor_held(recipe):
    tokens = draw(0, 90, batch=2)
    copies = [x.clone() for x in tokens]
    cache = LayerCache(recipe)
    feed(cache, *tokens, [60, 1, 29])
    for x, copy in zip(tokens, copies, strict=True):
        assert torch.equal(x, copy)
    before = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in state(cache).items()}
    for x in tokens:
        x.zero_()
    assert_same_state(state(cache), before)


@core_recipes
def test_a_padding_mask_of_ones_is_no_mask(recipe):
    q, k, v = draw(0, 90, batch=2)
    ones = torch.ones(2, 90, dtype=torch.bool)
    sizes = [60, 1, 29]
    masked, bare = LayerCache(recipe), LayerCache(recipe)
    a, b = feed(masked, q, k, v, sizes, ones), feed(bare, q, k, v, sizes)
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@core_recipes
def test_heads_of_strange_layout_are_taken(recipe):
    q, k, v = draw(0, 90, batch=2, hq=4, hk=2)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    one, two = LayerCache(recipe), LayerCache(recipe)
    a, b = feed(one, q, k, v, [60, 1, 29]), feed(two, *strided, [60, 1, 29])
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    assert_same_state(state(one), state(two))


def test_gradients_do_not_tie_steps_together():
    q, k, v = (x.requires_grad_() for x in draw(0, 8))
    cache = LayerCache(resolve("kivi"))
    out = attend(cache, q, k, v)
    assert out.requires_grad
    assert not probe.keys(cache).tail.view().requires_grad


def test_a_step_of_another_batch_is_refused_after_the_batch_changed():
    cache = build(resolve("kivi:residual=32"), *draw(0, 40, batch=2))
    attend(cache, *draw(1, 1, batch=2))
    cache.map(lambda x: x[:1])
    message = refuses(cache, CacheMisuse, lambda: attend(cache, *draw(1, 1, batch=2)))
    assert "batch size 1 and was given 2" in message
    attend(cache, *draw(1, 1, batch=1))


def test_prefill_is_attention_without_its_output():
    for name in ("kivi:residual=32", "h2o:tokens=24", "snapkv:tokens=24,window=8", "streaming"):
        q, k, v = draw(2, 60)
        one, other = LayerCache(resolve(name)), LayerCache(resolve(name))
        one.attend(q, k, v, scale=SCALE)
        assert other.prefill(StepInputs(Queries(q, SCALE), k, v)) is None
        assert one.nbytes == other.nbytes
        for seed in range(3):
            step = draw(10 + seed, 1)
            assert torch.equal(attend(one, *step), attend(other, *step))
        with pytest.raises(CacheMisuse, match="prefill is for the first prompt"):
            other.prefill(StepInputs(Queries(q, SCALE), k, v))
