"""Which recipes pages of an engine hold, and how these are packed."""

from dataclasses import replace

import pytest

import kvloom
from kvloom.errors import IncompatibleRecipe
from kvloom.paged import LayerPlan, check_pages_hold, packed_by_page
from kvloom.recipe import Protect, resolve


def paged(recipe, page=128, evicts=False):
    return packed_by_page(recipe, page, "a test", "page=", evicts)


@pytest.mark.parametrize(
    ("recipe", "nearest"),
    [
        ("h2o", "'near-lossless', which keeps"),
        ("streaming", "'near-lossless', which keeps"),
        ("minikv", "'kivi', which keeps"),
        ("small", "'near-lossless', which keeps"),
        ("quest", "'near-lossless', which reads"),
        ("clusterkv-2bit", "'kivi', which reads"),
        ("kivi@0=h2o", "'kivi', which keeps"),
        ("kivi:compress_after=100", "leave out compress_after=100"),
        ("skvq:outliers=8", "leave out outliers"),
    ],
)
def test_recipes_that_no_page_holds(recipe, nearest):
    for check in (paged, lambda recipe: check_pages_hold(resolve(recipe), "a test", evicts=False)):
        with pytest.raises(IncompatibleRecipe, match=f"in a test, .*{nearest}"):
            check(recipe)


@pytest.mark.parametrize(
    ("recipe", "page", "use"),
    [
        ("kivi", 48, "page=64"),
        ("balanced", 96, "page=128"),
        ("full@0=kivi", 48, "page=64"),
        ("kivi:sinks=129", 128, "sinks=128 or fewer, or a larger page"),
        ("kivi@0=kivi-4:sinks=129", 128, "sinks=128 or fewer"),
    ],
)
def test_pages_that_do_not_fit_a_recipe(recipe, page, use):
    with pytest.raises(ValueError, match=use):
        paged(recipe, page)


def test_keys_and_values_are_packed_by_page_and_sinks_stay():
    found = paged("near-lossless@0=kivi:sinks=2", 256)
    for recipe in (found, found.for_layer(0, range(4))):
        assert {fmt.residual for fmt in recipe.store.quantized.values()} == {256}
        assert recipe.protect.exact_recents == (0, 0)
    assert (found.protect.sinks, found.for_layer(0, range(4)).protect.sinks) == (4, 2)
    assert kvloom.Recipe.from_toml(found.to_toml()) == found


@pytest.mark.parametrize(
    ("recipe", "remedy"),
    [
        ("h2o", "every token after the prompt, .*use 'near-lossless'"),
        ("streaming", "every token after the prompt"),
        ("small:block=256", "every token after the prompt"),
        ("kvzip", "use another, such as rotated"),
        ("snapkv:positions=renumbered", "use positions=original"),
        (replace(resolve("knorm"), store=resolve("skvq").store), "each head packs its own tokens"),
        ("skvq:span=head@0=snapkv", "tokens of any positions; use pre_rope=false"),
        ("skvq:pre_rope=false,reorder=false,clip=1.0@0=snapkv", "own tokens; use span=head"),
        ("smoothquant@0=snapkv", "use pre_rope=false"),
        (replace(resolve("snapkv"), protect=Protect(spans=((0, 9),))), "leave out ids, spans"),
    ],
)  # fmt: skip
def test_evictions_that_no_page_holds(recipe, remedy):
    with pytest.raises(IncompatibleRecipe, match=f"in a test, .*{remedy}"):
        paged(recipe, evicts=True)


def test_an_eviction_stays_and_packs_sinks():
    found = paged("expected:store=kivi@0=expected", evicts=True)
    assert found.keep == resolve("expected").keep
    for layer, residuals in ((0, set()), (1, {128})):
        plain = found.for_layer(layer, range(4))
        assert plain.protect.sinks == 4
        assert plain.keep == found.keep
        assert {fmt.residual for fmt in plain.store.quantized.values()} == residuals
        assert LayerPlan.of_recipe(plain).sinks == 0


def test_an_exact_page_needs_no_sinks():
    exact, packed = (LayerPlan.of_recipe(paged(name)) for name in ("full", "kivi:sinks=5"))
    assert (exact.keys, exact.values, exact.sinks) == (None, None, 0)
    assert packed.sinks == 5
