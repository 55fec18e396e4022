"""The named recipes and the compact spelling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.errors import RecipeError
from kvloom.keep import Budget, Keep, Mass
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import RECIPES, options, resolve, summary
from kvloom.store import Packed, Store


def test_the_names_there_are():
    assert set(RECIPES) >= {"full", "kivi", "kivi-4", "rtn", "window", "streaming"}


def test_kivi_reads_as_the_paper():
    assert resolve("kivi") == Recipe(
        store=Store(Packed(2, "channel", 32, "fp16", residual=128), Packed(2, "token", 32, "fp16")),
        protect=Protect(exact_recent=(0, 128)),
        name="kivi",
    )


@pytest.mark.parametrize(
    ("spelling", "same"),
    [
        ("kivi-4", "kivi:bits=4"),
        ("kivi:", "kivi"),
        (" kivi : group = 32 , residual = 128 ", "kivi"),
        ("kivi:group=64,residual=64,", "kivi:residual=64,group=64"),
        ("rtn:meta=bf16", "rtn:meta=bf16,bits=2"),
        ("streaming:sinks=4", "streaming"),
    ],
)
def test_spellings_of_the_same_recipe(spelling, same):
    a, b = resolve(spelling), resolve(same)
    assert (a.keep, a.store, a.recall, a.protect) == (b.keep, b.store, b.recall, b.protect)


def test_overrides_reach_both_windows():
    recipe = resolve("kivi:group=64,residual=192,bits=4,meta=fp32")
    assert recipe.store.keys == Packed(4, "channel", 64, "fp32", residual=192)
    assert recipe.store.values == Packed(4, "token", 64, "fp32")
    assert recipe.protect.exact_recents == (0, 192)


@pytest.mark.parametrize("name", ["kivi", "kivi:group=64,residual=128", "kivi-4"])
def test_a_recipe_is_called_what_the_user_called_it(name):
    assert resolve(name).name == name


def test_a_window_is_a_share_or_a_whole_number_of_tokens():
    assert resolve("h2o:recent=0.25").keep.budget.recent == 0.25
    for name in ("h2o", "keyformer", "random", "minikv", "minikv-pyramid"):
        assert resolve(f"{name}:recent=64").keep.budget.recent_of(300) == 64


def test_a_fraction_counts_where_it_is_given():
    for name in ("snapkv", "pyramidkv"):
        assert resolve(name).keep.budget.resolve(5000) == 1024
        assert resolve(f"{name}:fraction=0.25").keep.budget.resolve(5000) == 1250
    assert resolve("h2o:tokens=64").keep.budget.resolve(5000) == 64


def test_any_score_evicts_at_a_limit_or_from_blocks():
    limited = resolve("evict:when=limit,limit=80,tokens=40")
    assert limited.keep == resolve("h2o:limit=80,tokens=40").keep
    assert resolve("evict:when=block,block=64,fraction=0.3,recent=8").keep == Keep(
        Budget(fraction=0.3, recent=8, head_share=1.0), Mass(), when="block", block=64
    )


def test_minikv_packs_in_all_the_bits_there_are():
    assert resolve("minikv:bits=1.5").store.values.bits == 1.5
    assert resolve("minikv-snap:bits=1.5").store.keys.bits == 1.5


def test_a_recipe_resolves_to_itself():
    recipe = Recipe(protect=Protect(sinks=2))
    assert resolve(recipe) is recipe


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("kiwi", ["no recipe named 'kiwi'", "did you mean 'kivi'", *RECIPES]),
        ("kivi-3", ["no recipe named 'kivi-3'", "did you mean 'kivi"]),
        ("kivi2", ["no recipe named 'kivi2'", "did you mean 'kivi"]),
        ("streming", ["did you mean 'streaming'"]),
        ("KIVI", ["no recipe named 'KIVI'", "did you mean 'kivi'"]),
        ("", ["no recipe named ''", *RECIPES]),
        ("zzz", ["no recipe named 'zzz'", *RECIPES]),
        ("kivi:bit=2", ["no option 'bit'", "did you mean 'bits'", "bits, group, residual, meta"]),
        ("kivi:residuals=64", ["no option 'residuals'", "did you mean 'residual'"]),
        ("kivi-4:bits=4", ["'kivi-4' has no option 'bits'", "group, residual, meta"]),
        ("full:bits=2", ["'full' has no option 'bits'", "it has compress_after, sliding"]),
        ("kivi:bits", ["option 'bits' of recipe 'kivi' needs a value", "bits=…"]),
        ("kivi:bits=", ["needs a value"]),
        ("kivi:bits=two", ["option 'bits' of recipe 'kivi' must be a number, not 'two'"]),
        ("kivi:group=2.5", ["must be a whole number, not '2.5'"]),
        ("kivi:bits=5", ["bits=5 is not one of 1, 1.5, 2, 3, 4, 8"]),
        ("kivi:residual=-32", ["residual=-32"]),
        ("snapkv:tokens=64,fraction=0.5", ["'snapkv': tokens=64 and fraction=0.5 are two sizes"]),
        ("evict:fraction=0.5,tokens=64", ["'evict': tokens=64 and fraction=0.5 are two sizes"]),
        ("small:fraction=0", ["'small': fraction=0 is no budget"]),
        ("h2o:tokens=0", ["'h2o': tokens=0 is no budget"]),
        ("evict:score=expected,epsilon=nan", ["epsilon=nan must be a finite number"]),
        ("h2o:recent=-inf", ["recent=-inf must be a finite number"]),
        (
            "vatp:sinks=128",
            ["budget of a fraction is 128 tokens", "sinks=128 would fill; use fewer sinks"],
        ),
        ("evict:score=reconstruction", ["'reconstruction' repeats the first prompt, and no later"]),
        ("window:tokens=0", ["tokens=0", "above 0"]),
        ("streaming:tokens=4", ["a budget of 4 tokens leaves nothing", "use 5 or more"]),
        ("evict:when=limit", ["limit=None with when='limit'", "give a limit"]),
        ("evict:limit=80,tokens=40", ["limit=80 with when='step'", 'with when="limit"']),
        ("evict:block=64", ["block=64 with when='step'", 'with when="block"']),
        ("streaming:sinks=-1", ["sinks=-1", "0 or more"]),
        ("quest:tokens=90", ["leaves nothing to find beside 80 protected tokens; use 96 or more"]),
        ("clusterkv:distance=l3", ["distance='l3' is not one of cosine, l2, inner"]),
        ("clusterkv:query_heads=all", ["query_heads='all' is not one of mean, max, turns, each"]),
        ("clusterkv:tier=x", ["tier='x' is not one of device, host, file; tier=device keeps"]),
        *(
            (f"{name}:steps=2", ["steps=2 says what", "add tier=host or tier=file, or leave steps"])
            for name in ("clusterkv", "clusterkv-2bit", "quest")
        ),
        (
            "near-lossless:compress_after=1000,sliding=packed",
            ["compress_after=1000 keeps tokens exact that sliding=", "leave out one of the two"],
        ),
        ("minikv:residual=100", ["residual=100 is not a multiple of group=16", "use 16 or 64"]),
    ],
)
def test_a_wrong_name_or_value_says_what_is_allowed(spelling, says):
    with pytest.raises(RecipeError) as refused:
        resolve(spelling)
    for words in says:
        assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with recipe files: good ones under three names, and bad ones."""
    document = resolve("kivi:bits=4").to_toml()
    for name in ("mine.toml", "mine", "kivi"):
        (tmp_path / name).write_text(document)
    (tmp_path / "bad.toml").write_text("bits: 2")
    (tmp_path / "wrong.toml").write_text("[stor]\n")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.toml").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", ["mine.toml", "mine", "./kivi"])
def test_a_file_is_a_recipe(folder, name, kind):
    path = folder / name if kind is Path else name
    found = resolve(path)
    assert found.name == str(path)
    assert replace(found, name="") == replace(resolve("kivi:bits=4"), name="")
    assert Recipe.from_toml(path) == resolve("kivi:bits=4")  # the name that the file gives


def test_a_name_is_a_name_though_there_is_such_a_file(folder):
    assert resolve("kivi").store.keys.bits == 2
    assert resolve(Path("kivi")).store.keys.bits == 4


@pytest.mark.parametrize("read", [resolve, Recipe.from_toml])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none.toml", "cannot be read (No such file or directory); give an existing TOML file"),
        ("folder.toml", "cannot be read (Is a directory)"),
        ("bytes.toml", "is not UTF-8 text; give a TOML file"),
        ("bad.toml", "is not a recipe: not a TOML recipe: "),
        ("wrong.toml", "is not a recipe: Recipe has no field 'stor'; it has keep, store"),
    ],
)
def test_a_file_that_is_no_recipe_says_why(folder, read, name, why):
    for path in (name, folder / name):
        with pytest.raises(RecipeError) as refused:
            read(path)
        assert str(refused.value).startswith(f"recipe file {str(path)!r} {why}")
        assert "\n" not in str(refused.value)


def test_something_else_is_no_recipe():
    with pytest.raises(RecipeError, match="expected a Recipe, its name or its TOML file, got int"):
        resolve(2)


def test_every_recipe_has_one_line_and_defaults_for_its_options():
    for name in RECIPES:
        line = summary(name)
        assert 10 < len(line) <= 100, name
        assert line.endswith("."), name
        assert all(default is not None for default in options(name).values()), name
        spelled = ",".join(f"{k}={v}" for k, v in options(name).items())
        found, want = resolve(f"{name}:{spelled}"), resolve(name)
        assert (found.store, found.keep, found.protect) == (want.store, want.keep, want.protect)


def test_three_recipes_by_their_options():
    assert options("kivi") == {
        "bits": 2, "group": 32, "residual": 128, "meta": "fp16", "rotate": False,
        "sinks": 0,
    }  # fmt: skip
    assert options("streaming") == {"tokens": 1024, "sinks": 4, "positions": "original"}
    assert options("full") == {}


@pytest.mark.parametrize("spec", ["kivi:bits=4,bits=2", "skvq:outliers=8,outliers=4"])
def test_an_option_that_is_given_twice_is_refused(spec):
    with pytest.raises(RecipeError, match="given twice; give it once"):
        resolve(spec)
