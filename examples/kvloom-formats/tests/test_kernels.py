"""The kernels agree with the reference, and recipes of these formats work in a model."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import tomllib
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvloom
from kvloom.errors import NotFinite
from kvloom.kernels import operations_run, use_backend
from kvloom.recall import Tier
from kvloom.recipe import RECIPES, Geometry, Protect, Recipe, resolve
from kvloom.store import FORMATS, FormatView

RECIPE_NAMES = [
    "kvarn:unit=16", "kvarn:bits=4,value_bits=1,unit=8,sinks=0,meta=bf16",
    "kitty:boost=8,group=8,residual=16,sinks=3", "kitty:boost=0,group=4,residual=4,rotate=true",
]  # fmt: skip


def llama():
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=48, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def stored(fmt, x):
    """Tokens [B, Hk, N, D] in a format, or as they are."""
    if fmt is None or not isinstance(fmt, tuple(FORMATS[name] for name in ("kvarn", "kitty"))):
        return x
    return FormatView(fmt.pack(x), fmt, 0, x.shape[2], x.dtype)


@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "hidden"), [(1, False), (1, True), (3, False)])
def test_the_kernel_attends_as_formula(name, dtype, queries, hidden):
    store = resolve(name).store
    k, v = torch.randn(2, 2, 2, 208, 32).to(dtype)
    q, visible = torch.randn(2, 6, queries, 32).to(dtype), None
    if hidden:
        visible = torch.rand(2, 1, 208) > 0.5
        visible[1] = False
    keys, values = stored(store.keys, k), stored(store.values, v)
    state = store.keys.attend(q, keys, values, 0.2, visible=visible)
    k, v = (x.double() if x is y else float_of(y) for x, y in ((k, keys), (v, values)))
    k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
    logits = 0.2 * q.double() @ k.transpose(-1, -2)
    if hidden:
        logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    out = (logits.softmax(dim=-1) @ v).nan_to_num()
    torch.testing.assert_close(state.out.double(), out, rtol=0, atol=5e-6)
    torch.testing.assert_close(state.lse.double(), logits.logsumexp(dim=-1), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_part_of_the_packed_tokens(name):
    """Tokens of a view may begin and end within a unit."""
    store = resolve(name).store
    k, v = torch.randn(2, 1, 2, 96, 32)
    q = torch.randn(1, 4, 1, 32)
    keys, values = (stored(fmt, x) for fmt, x in ((store.keys, k), (store.values, v)))
    for lo, hi in ((0, 50), (21, 22), (37, 96)):
        sides = [x.cut(lo, hi) if isinstance(x, FormatView) else x[:, :, lo:hi]
                 for x in (keys, values)]  # fmt: skip
        state = store.keys.attend(q, *sides, 0.2)
        k, v = (x.double() if isinstance(x, torch.Tensor) else float_of(x) for x in sides)
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        logits = 0.2 * q.double() @ k.transpose(-1, -2)
        out = logits.softmax(dim=-1) @ v
        torch.testing.assert_close(state.out.double(), out, rtol=0, atol=5e-6)


def float_of(view):
    """What packed tokens are, without rounding to the model's dtype."""
    return view._replace(dtype=torch.float32).tensor().double()


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_case_without_a_kernel_is_refused_with_the_reason(name):
    fmt, x = resolve(name).store.keys, torch.randn(1, 2, 16, 32)
    q, keys = torch.randn(1, 4, 1, 32), FormatView(fmt.pack(x), fmt, 0, 16, torch.float32)
    both = (keys, keys) if "kvarn" in name else (keys, x)
    assert fmt.attend_problems(q, *both) == []
    assert fmt.attend_problems(q, *both, softcap=30.0) == ["it has no softcap"]
    bias = torch.zeros(1, 4, 16)
    assert fmt.attend_problems(q, *both, bias=bias) == ["it adds no bias to the logits"]
    many = q.expand(-1, -1, 9, -1)
    assert fmt.attend_problems(many, *both) == ["more than 8 queries a step"]
    assert fmt.attend_problems(q.to("meta"), *both) == ["queries are on meta"]
    (reason,) = fmt.attend_problems(q, x, keys)
    assert "packed in it" in reason
    other = FormatView(keys.tensors, FORMATS["packed"](2, "token", 32), 0, 16, torch.float32)
    assert fmt.attend_problems(q, other, x) == [reason], "its tensors are another format's"


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_the_reason_of_unpacked_tokens_is_counted(name):
    model, ids = llama(), torch.randint(2, 97, (1, 79))
    with use_backend("auto"), torch.no_grad():
        cache = kvloom.Cache(model, name)
        model(ids[:, :70], past_key_values=cache)
        before = operations_run()
        model(ids[:, 70:], past_key_values=cache)
        ran = operations_run() - before
    why = f"{name.split(':')[0]}: more than 8 queries a step"
    assert any(who == "ref" and reason.startswith(why) for _, who, reason in ran)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_generate_by_the_kernel_is_generate_by_the_reference(name):
    model, ids = llama(), torch.randint(2, 97, (2, 70))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    texts, caches = [], []
    for backend in ("ref", "auto"):
        with use_backend(backend):
            before = operations_run()
            cache = kvloom.Cache(model, name)
            texts.append(model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, do_sample=False
            ))  # fmt: skip
            caches.append(cache)
            ran = operations_run() - before
            by_kernel = ran["attend", name.split(":")[0], ""]
            # a step attends to keys with packed and with exact values, in each of two layers
            assert by_kernel == 0 if backend == "ref" else by_kernel >= 2 * 39
            attended = {who for operation, who, _ in ran if operation == "attend"}
            assert attended == {"ref"} if backend == "ref" else "ref" not in attended
            assert not any(operation == "unpack" for operation, *_ in ran if backend == "auto") or (
                "kitty" in name  # whose values are kvloom's own
            )
    assert torch.equal(*texts)
    assert caches[0].nbytes == caches[1].nbytes


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_predicted_bytes_are_those_of_a_prompt(name):
    model = llama()
    cache = kvloom.Cache(model, name)
    model(torch.randint(2, 97, (2, 109)), past_key_values=cache)
    geometry = Geometry(2, 4, 2, 32, torch.float32)
    assert resolve(name).nbytes(109, geometry, 2) == cache.nbytes


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_numbers_that_cannot_be_packed_are_refused(name):
    model, ids = llama(), torch.randint(2, 97, (1, 70))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[:32] *= 1e30
        model.model.layers[1].self_attn.v_proj.weight[:32] *= 1e30
    with pytest.raises(NotFinite, match=r"layer 1: \|x\| > .* in keys"):
        model(ids, past_key_values=kvloom.Cache(model, name))


def test_a_saved_cache_continues(tmp_path):
    model, ids = llama(), torch.randint(2, 97, (1, 70))
    cache = kvloom.Cache(model, RECIPE_NAMES[0])
    model(ids, past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = kvloom.Cache.load(model, tmp_path / "cache")
    step = ids[:, :1]
    a, b = (model(step, past_key_values=one).logits for one in (cache, loaded))
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", RECIPE_NAMES[:3])  # the last one rotates values in groups
def test_a_tier_changes_no_answer(name):
    model, ids = llama(), torch.randint(2, 97, (2, 90))
    recall = replace(resolve("quest:page=4,tokens=40,sinks=4,recent=8").recall, full_layers=0)
    recipe = replace(resolve(name), recall=recall, protect=Protect(4))
    tier = replace(recipe, recall=replace(recall, tier=Tier()))
    caches = [kvloom.Cache(model, one) for one in (recipe, tier)]
    with torch.no_grad():
        for lo, hi in ((0, 80), *((i, i + 1) for i in range(80, 90))):
            plain, stored = (model(ids[:, lo:hi], past_key_values=one).logits for one in caches)
            torch.testing.assert_close(stored, plain, rtol=1e-4, atol=1e-4)
    assert caches[1].traffic.misses > 0


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_heads_of_different_lengths_have_predicted_bytes(name):
    model, ids = llama(), torch.randint(2, 97, (2, 90))
    keep = resolve("snapkv:tokens=60,window=8,head_share=0.2").keep
    recipe, outputs = Recipe(keep=keep, store=resolve(name).store), []
    for backend in ("ref", "auto"):
        cache = kvloom.Cache(model, recipe)
        with use_backend(backend), torch.no_grad():
            model(ids[:, :80], past_key_values=cache)
            assert cache.nbytes == cache.recipe.nbytes(80, cache.geometry, 2)
            steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(80, 90)]
        outputs.append(torch.cat(steps))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)


def test_entry_points_register_the_recipes():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for name, module in project["entry-points"]["kvloom.plugins"].items():
        assert getattr(import_module(module), name) is RECIPES[name]
