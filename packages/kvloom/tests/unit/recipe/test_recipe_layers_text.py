"""Recipes that differ by layer as text: the compact spelling, dict and TOML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layered import FOUR, SNAP, TWO, stores

from kvloom.errors import RecipeError
from kvloom.recall import Pages, Recall
from kvloom.recipe import LayerOverride, Protect, Recipe, resolve
from kvloom.store import Store
from kvloom_lab.cli.options import split_recipes as split

# --- the compact spelling ------------------------------------------------------------------------


def test_layers_in_the_compact_spelling():
    spelled = "kivi:bits=4,compress_after=64@first 2=full@last2=rtn:bits=8,group=16"
    recipe = resolve(spelled)
    kivi, rtn = resolve("kivi:bits=4"), resolve("rtn:bits=8,group=16")
    assert recipe == Recipe(
        store=kivi.store,
        protect=kivi.protect,
        compress_after=64,
        name=spelled,
        layers=(
            LayerOverride("first 2", None, Store(), None, Protect()),
            LayerOverride("last 2", None, rtn.store, None, rtn.protect),
        ),
    )


def test_files_and_overrides_combine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "four.toml").write_text(resolve("rtn:bits=4").to_toml())
    (tmp_path / "a@0=b").write_text(resolve("rtn:bits=8").to_toml())
    four = resolve("rtn:bits=4").store
    assert stores(resolve("four.toml@0=full"), range(2)) == [Store(), four]
    assert stores(resolve("full@0=four.toml"), range(2)) == [four, Store()]
    assert resolve("a@0=b").store == resolve("rtn:bits=8").store
    path = str(tmp_path / "me@home" / "c.kvcal")
    assert resolve(f"skvq:calibration={path},window=64").store.calibration == path


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("kivi@frist 2=full", "where='frist 2' does not name layers"),
        ("kivi@first 2", """'kivi@first 2': spell layers as in "kivi@first 2=full\""""),
        ("kivi:bits=4@0,1=full", "bits='4@0': spell layers as in"),
        ("kivi@first 2=ful", "no recipe named 'ful' (did you mean 'full'?)"),
        (
            "kivi@0=full:compress_after=3",
            "layers '0': 'full:compress_after=3' has layers, compress_after or sliding of its own",
        ),
        ("kivi:compress_after=", "option 'compress_after' of recipe 'kivi' needs a value"),
        (
            "kivi:compress_after=2k",
            "must be a whole number, not '2k'",
        ),
        ("kivi:compress_after=-1", "compress_after=-1 must be a whole number of tokens, 0 or more"),
    ],
)
def test_a_wrong_spelling_of_layers_is_refused(spelling, says):
    with pytest.raises(RecipeError) as refused:
        resolve(spelling)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "recipes",
    [
        ["kivi:bits=4,group=64", "rtn"],
        ["kivi:bits=4", "window@first 2=full", "rtn"],
        ["kivi@first 2=full@last2=kivi:bits=4,group=32", "rtn:bits=2"],
        ["kivi:bits=4,group=32@first 2=rtn:bits=2,group=16", "full@1=kivi:bits=4", "h2o"],
    ],
)
def test_a_list_of_recipes_is_split_at_its_names(recipes):
    assert split(",".join(recipes)) == recipes


# --- data and TOML -------------------------------------------------------------------------------


def test_layers_in_toml_written_by_hand():
    recipe = Recipe.from_toml(
        """
        compress_after = 2048
        [store.keys]
        bits = 2
        axis = "token"
        [keep]
        when = "prompt"
        budget = { tokens = 40 }
        scorer = "mass"
        [[layers]]
        where = "first 2"
        keep = "all"
        store = {}
        [[layers]]
        where = "last 1"
        recall = "off"
        [layers.protect]
        sinks = 4
        [[layers]]
        where = "2-3"
        recall = { index = "pages", tokens = 200 }
        """
    )
    assert recipe == Recipe(
        keep=SNAP,
        store=TWO,
        compress_after=2048,
        layers=(
            LayerOverride("first 2", keep=None, store=Store()),
            LayerOverride("last 1", recall=None, protect=Protect(4)),
            LayerOverride("2-3", recall=Recall(Pages(), 200)),
        ),
    )


overrides = st.builds(
    LayerOverride,
    where=st.integers(0, 99) | st.sampled_from(["first 3", "last 1", "4-9"]),
    store=st.sampled_from([Store(), FOUR, TWO]),
) | st.sampled_from(
    [
        LayerOverride(1, keep=None),
        LayerOverride(2, keep=SNAP, recall=None),
        LayerOverride(3, recall=Recall(Pages(), 300), protect=Protect(2, (0, 8))),
        LayerOverride(4, protect=Protect()),
    ]
)


@given(st.lists(overrides, max_size=4), st.integers(0, 9999))
def test_any_layers_come_back_from_a_dict_and_from_toml(layers, start):
    recipe = Recipe(store=FOUR, layers=tuple(layers), compress_after=start)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"layers": [{"store": {}}]}, "layers: LayerOverride needs the field 'where'"),
        ({"layers": [{"where": "x", "store": {}}]}, "where='x' does not name layers"),
        ({"layers": [{"where": 1, "name": "a"}]}, "LayerOverride has no field 'name'; it has"),
        ({"layers": {"where": 1}}, "must be a tuple"),
        ({"layers": [3]}, "layers must be a table of where, keep"),
        ({"compress_after": "x"}, "compress_after='x' must be a whole number"),
    ],
)
def test_bad_layers_in_data_are_refused_by_name(data, says):
    with pytest.raises(RecipeError) as refused:
        Recipe.from_dict(data)
    assert says in str(refused.value)
