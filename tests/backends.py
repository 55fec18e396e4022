"""Laws and whole models run by the kernels that a user gets, and by the reference."""

from __future__ import annotations

from functools import cache

import pytest

from kvloom.errors import RecipeError
from kvloom.kernels import dispatch
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from kvloom.store import Encoding, Packed, Store
from steps import RECIPES


@pytest.fixture(autouse=True, params=dispatch.CHOICES)
def kernels(request):
    """Run the test by this backend. By default each case runs by one of them: see `sampling`."""
    with dispatch.use(request.param):
        yield


by_reference = pytest.mark.parametrize(
    "kernels", [pytest.param("auto", marks=pytest.mark.slow), "ref"], indirect=True
)
"""Runs a test by the reference by default: its kernels take long to compile, or it needs none."""


def _plain(fmt: Packed | None) -> Encoding | None:
    """The fields of a format that a kernel is compiled for."""
    return fmt and fmt.encoding


def _compiled_for(store: Store) -> tuple:
    return _plain(store.keys), _plain(store.values)


ONE_ROW = (
    "llama-mha", "gpt2", "opt", "gpt-neox", "gptj", "mpt", "falcon-alibi", "bloom", "codegen",
    "gpt-neo", "gpt-neox-japanese", "xglm",
)  # fmt: skip
"""Models whose query heads share no keys: a kernel that reads a row at a time serves them alone."""
COMMON = {_compiled_for(resolve("kivi:group=32,residual=32").store), _compiled_for(Store())}


def takes_rare_kernels(item: pytest.Item) -> bool:
    """Whether a case runs by kernels that few other tests use.

    A kernel takes seconds to compile for a format, so the default run compiles those of COMMON
    stores. With other stores, the models of ONE_ROW and parameters marked `rare`, it runs a law or
    a model by the reference, and the tests of kernels by kernels.
    """
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if params.get("kernels") != "auto":
        return False
    return item.get_closest_marker("rare") is not None or not all(map(_common, params.values()))


def _common(value: object) -> bool:
    """Whether a parameter is no store, or one of COMMON."""
    if isinstance(value, Packed):
        return False
    if isinstance(value, str):
        return _common_word(value)
    return not isinstance(value, Recipe) or _compiled_for(value.store) in COMMON


@cache
def _common_word(word: str) -> bool:
    """Whether a word is neither one of ONE_ROW nor a recipe whose store is not COMMON."""
    if word in ONE_ROW:
        return False
    try:
        return _common(RECIPES.get(word) or resolve(word))
    except RecipeError:
        return True
