"""Registries: what they accept, what they refuse before anything changes, and plugins."""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar

import pytest

import kvloom
from kvloom.errors import RecipeError
from kvloom.keep import SCORERS, Mass, Scorer
from kvloom.recall import INDEXES, Index
from kvloom.recipe import RECIPES, Recipe, part_options, resolve
from kvloom.registry import GROUP, Registry
from kvloom.registry import registry as plugins
from kvloom.store import FORMATS, Format

REGISTRIES = {"score": SCORERS, "index": INDEXES, "format": FORMATS, "recipe": RECIPES}
BUILT_IN = {what: list(registry) for what, registry in REGISTRIES.items()}


@pytest.fixture(autouse=True)
def unregistered():
    """Registrations of a test end with it."""
    before = {what: dict(registry._entries) for what, registry in REGISTRIES.items()}
    yield
    for what, registry in REGISTRIES.items():
        registry._entries = before[what]


def entry(what: str, name: str):
    """A class or function to register."""
    base = {"score": Scorer, "index": Index, "format": Format}.get(what)
    if base is None:
        return lambda: Recipe()

    @dataclass(frozen=True)
    class Mine(base):
        size: int = 3
        kind: ClassVar[str] = name
        __call__ = finder = pack = unpack = nbytes = lambda self, *_: None

    return Mine


@pytest.mark.parametrize("what", REGISTRIES)
def test_a_registered_name_follows_the_built_in_ones(what):
    registry = REGISTRIES[what]
    mine = entry(what, "mine")
    assert registry.register(mine, "mine") is mine
    assert list(registry) == [*BUILT_IN[what], "mine"]
    assert registry["mine"] is mine
    assert not registry.is_builtin("mine")
    assert registry.is_builtin(BUILT_IN[what][0])


@pytest.mark.parametrize("what", REGISTRIES)
def test_a_name_that_is_taken_is_refused_and_changes_nothing(what):
    registry = REGISTRIES[what]
    registry.register(entry(what, "mine"), "mine")
    before = dict(registry)
    for name, origin in ((BUILT_IN[what][0], "built-in"), ("mine", "registered")):
        with pytest.raises(RecipeError, match=f"{name!r} is the name of a {origin} {what}; choose"):
            registry.register(entry(what, name), name)
    assert dict(registry) == before


def test_public_functions_are_decorators():
    mine = entry("score", "mine")
    assert kvloom.register_score(mine) is mine
    assert kvloom.register_index(entry("index", "mine")).kind == "mine"
    assert kvloom.register_format(entry("format", "mine")).kind == "mine"

    @kvloom.register_recipe("my-recipe")
    def my_recipe(sinks: int = 2, recent: int | None = None) -> Recipe:
        """Sinks and nothing else."""
        return Recipe(protect=kvloom.Protect(sinks=sinks))

    assert resolve("my-recipe:sinks=3,compress_after=9").protect.sinks == my_recipe(3).protect.sinks
    assert resolve("my-recipe:compress_after=9").compress_after == 9
    assert kvloom.register_recipe(named_by_itself) is named_by_itself
    assert resolve("named-by-itself:a=2").compress_after == 2


@pytest.mark.parametrize(
    ("register", "says"),
    [
        (lambda: SCORERS.register(3), "3 is not a score: derive a class from Scorer"),
        (lambda: SCORERS.register(entry("index", "x")), "Mine is not a score: derive a class"),
        (lambda: SCORERS.register(Scorer), "Scorer is not a score"),
        (lambda: SCORERS.register(Mass()), "is not a score: derive a class from Scorer"),
        (lambda: SCORERS.register(EMPTY[0]), "EmptyScore lacks __call__: a score defines __call__"),
        (
            lambda: INDEXES.register(EMPTY[1]),
            "EmptyIndex lacks finder: an index defines finder, nb",
        ),
        (lambda: FORMATS.register(EMPTY[2]), "EmptyFormat lacks pack: a format defines pack, unp"),
        (lambda: SCORERS.register(entry("score", "")), "Mine has no name: give it kind"),
        (lambda: SCORERS.register(entry("score", "a,b")), "'a,b' is not a name for a score: use"),
        (lambda: SCORERS.register(entry("score", "a@b")), "'a@b' is not a name for a score: use"),
        (lambda: SCORERS.register(entry("score", 5)), "5 is not a name for a score: use"),
        (lambda: kvloom.register_recipe(3), "recipe '' must be a function with a docstring"),
        (lambda: kvloom.register_recipe(kivi), "'kivi' is the name of a built-in recipe; choose"),
        (lambda: kvloom.register_recipe("x")(lambda: Recipe()), "with a docstring"),
        (lambda: kvloom.register_recipe("x")(needs), "option 'a' of recipe 'x' needs a default"),
        (lambda: kvloom.register_recipe("x")(untyped), "option 'a' of recipe 'x' needs a default"),
        (lambda: kvloom.register_recipe("x")(several), "option 'a' of recipe 'x' needs a default"),
        (lambda: kvloom.register_recipe("x")(starts), "cannot have an option 'compress_after'"),
    ],
)
def test_what_cannot_be_registered_is_refused(register, says):
    before = {what: dict(registry) for what, registry in REGISTRIES.items()}
    with pytest.raises(RecipeError) as refused:
        register()
    assert says in str(refused.value)
    assert {what: dict(registry) for what, registry in REGISTRIES.items()} == before


def empty(base):
    return type(f"Empty{base.__name__.replace('Scorer', 'Score')}", (base,), {"kind": "empty"})


EMPTY = [empty(base) for base in (Scorer, Index, Format)]


def needs(a: int) -> Recipe:
    """An option without a default."""
    return Recipe(compress_after=a)


def several(a: list = ()) -> Recipe:
    """An option that no text spells."""
    return Recipe(layers=a)


def untyped(a=1) -> Recipe:
    """An option without a type."""
    return Recipe(compress_after=a)


def kivi(a: int = 1) -> Recipe:
    """A function with the name of a built-in recipe."""
    return Recipe(compress_after=a)


def named_by_itself(a: int = 1) -> Recipe:
    """A function that gives the recipe its name."""
    return Recipe(compress_after=a)


def starts(compress_after: int = 1) -> Recipe:
    """An option that every recipe has."""
    return Recipe(compress_after=compress_after)


# --- plugins -------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Install plugins: modules by name, as their sources, that entry points of the group name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_state", "new")
    modules = []

    def install(**sources: str) -> list:
        points = []
        for name, source in sources.items():
            module = f"kvloom_plugin_{name}"
            (tmp_path / f"{module}.py").write_text(source)
            modules.append(module)
            value = f"{module}:register" if "def register" in source else module
            points.append(metadata.EntryPoint(name, value, GROUP))
        asked: list = []
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: [asked.append(group), points][1]
        )
        return asked

    yield install
    for module in modules:
        sys.modules.pop(module, None)


SCORE = """
from dataclasses import dataclass
from typing import ClassVar
import kvloom
from kvloom.keep import Scorer

@kvloom.register_score
@dataclass(frozen=True)
class Mine(Scorer):
    width: int = 4
    share: float = 0.5
    kind: ClassVar[str] = "{name}"

    def __call__(self, step):
        return step.mass()
"""
FUNCTION = """
def register():
    import kvloom
    @kvloom.register_recipe("called")
    def build(sinks: int = 1) -> kvloom.Recipe:
        "A recipe that a function registers."
        return kvloom.Recipe(protect=kvloom.Protect(sinks))
"""


def test_plugins_are_loaded_once_and_only_when_a_name_is_not_built_in(installed):
    asked = installed(a=SCORE.format(name="late"), b=FUNCTION)
    resolve("evict:score=observation@first 1=kivi")
    Recipe.from_toml(resolve("h2o").to_toml())
    assert asked == []
    assert resolve("evict:score=late,width=9,share=0.25").keep.scorer == SCORERS["late"](9, 0.25)
    assert asked == [GROUP]
    assert resolve("called:sinks=3").protect.sinks == 3
    with pytest.raises(RecipeError, match="no recipe named 'none'"):
        resolve("none")
    assert asked == [GROUP]
    assert part_options("evict")["late"] == {"width": 4, "share": 0.5}


def test_all_names_include_those_of_plugins(installed):
    installed(a=SCORE.format(name="late"))
    assert list(SCORERS)[-1] == "late"
    assert len(SCORERS) == len(BUILT_IN["score"]) + 1


def test_a_plugins_score_goes_through_toml(installed):
    installed(a=SCORE.format(name="late"))
    recipe = resolve("evict:score=late,width=2,when=prompt")
    assert Recipe.from_toml(recipe.to_toml()) == recipe == Recipe.from_dict(recipe.to_dict())
    assert recipe.to_dict()["keep"]["scorer"] == {"kind": "late", "width": 2, "share": 0.5}


def test_a_plugin_that_fails_is_named_and_the_others_load(installed):
    installed(
        a="raise ImportError('no such library')",
        b=SCORE.format(name="mass"),  # a built-in name
        c=SCORE.format(name="late"),
    )
    with pytest.warns(RuntimeWarning) as warned:
        assert "late" in SCORERS
    first, second = (str(one.message) for one in warned)
    assert first.startswith("kvloom plugin 'a' (kvloom_plugin_a) failed to load: ImportError: no")
    assert "plugin 'b'" in second
    assert "'mass' is the name of a built-in score" in second
    assert SCORERS["mass"] is Mass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "never" not in SCORERS


def test_a_plugin_may_look_up_names_while_it_loads(installed):
    installed(a="from kvloom.keep import SCORERS\nassert 'x' not in SCORERS\nlist(SCORERS)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "x" not in SCORERS


def test_another_thread_waits_for_plugins_that_are_being_loaded(installed):
    installed(a="import time\ntime.sleep(0.3)\n" + SCORE.format(name="late"))
    found = []
    threads = [threading.Thread(target=lambda: found.append("late" in SCORERS)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_a_registry_of_functions_has_no_base():
    registry = Registry("adapter", {"a": needs})
    registry.register(starts, "b")
    assert list(registry) == ["a", "b"]
    with pytest.raises(RecipeError, match="'a' is the name of a built-in adapter"):
        registry.register(starts, "a")


def test_an_unregistered_part_cannot_be_written_down():
    mine = entry("score", "mine")
    recipe = Recipe(keep=kvloom.Keep(kvloom.Budget(5), mine()))
    with pytest.raises(RecipeError, match=r"Mine cannot be written down; register it with kvloom."):
        recipe.to_toml()
    kvloom.register_score(mine)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
