"""Many cheap values in one test: `for_each` runs it for each of them and names those that fail."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch


class Axis(NamedTuple):
    """The values of some arguments, and what each value is called."""

    names: tuple[str, ...]
    values: list
    labels: list[str]

    def arguments(self, i: int) -> dict[str, object]:
        """The arguments of value i."""
        values = [self.values[i]] if len(self.names) == 1 else self.values[i]
        return dict(zip(self.names, values, strict=True))


_GRIDS: dict[Callable, tuple[Callable, list[Axis]]] = {}


def for_each(names: str | Sequence[str], values: Iterable, ids: Iterable | Callable | None = None):
    """Run a test for each of these values, as subtests of one case.

    It is written as `pytest.mark.parametrize` is; of two above each other, every combination runs.
    It is for values that take milliseconds, such as mistakes and their messages. Each begins with
    the same random numbers, an empty `tmp_path`, and nothing patched; other fixtures are set up
    once.
    """
    names = tuple(x.strip() for x in names.split(",")) if isinstance(names, str) else tuple(names)
    values = list(values)
    labels = [*map(ids or str, values)] if ids is None or callable(ids) else list(ids)
    assert len(values) == len(labels) > 0

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        test, inner = _GRIDS.get(test, (test, []))
        axes = [Axis(names, values, labels), *inner]

        @functools.wraps(test, updated=())  # not what hypothesis notes: `given` is inside
        def run(subtests: pytest.Subtests, **fixtures: object) -> None:
            for number, at in enumerate(itertools.product(*(range(len(x.values)) for x in axes))):
                label = ", ".join(axis.labels[i] for axis, i in zip(axes, at, strict=True))
                arguments = [axis.arguments(i) for axis, i in zip(axes, at, strict=True)]
                with subtests.test(msg=label), ExitStack() as stack:
                    torch.manual_seed(0)
                    own = _own(fixtures, number, stack)
                    test(**functools.reduce(dict.__or__, arguments, fixtures | own))

        _GRIDS[run] = (test, axes)
        run.pytestmark = list(getattr(test, "pytestmark", []))
        signature = inspect.signature(test)
        given = {name for axis in axes for name in axis.names}
        kept = [x for name, x in signature.parameters.items() if name not in given]
        kept.append(inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate


def _own(fixtures: dict, number: int, stack: ExitStack) -> dict:
    """The fixtures that a value does not share with others."""
    own = {}
    if "tmp_path" in fixtures:
        own["tmp_path"] = fixtures["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    if "monkeypatch" in fixtures:
        own["monkeypatch"] = stack.enter_context(fixtures["monkeypatch"].context())
    return own
