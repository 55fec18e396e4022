"""The examples, installed as plugins: entry points that tests of one process see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from kvloom.hf.models import ADAPTERS
from kvloom.keep import SCORERS
from kvloom.recall import INDEXES
from kvloom.recipe import RECIPES
from kvloom.registry import GROUP
from kvloom.registry import registry as plugins
from kvloom.store import FORMATS

HERE = Path(__file__).parent
EXAMPLES = sorted(path.stem for path in HERE.glob("my_*.py"))
REGISTRIES = (SCORERS, INDEXES, FORMATS, RECIPES, ADAPTERS)


@contextmanager
def installed(*modules: str) -> Iterator[None]:
    """Install modules of this folder as plugins, not loaded yet; afterwards they never were."""
    before = [dict(registry._entries) for registry in REGISTRIES]
    points = [metadata.EntryPoint(name, name, GROUP) for name in modules]
    others = metadata.entry_points

    def entry_points(**params: str) -> object:
        return points if params.get("group") == GROUP else others(**params)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        patch.setattr(metadata, "entry_points", entry_points)
        patch.setattr(plugins, "_state", "new")
        try:
            yield
        finally:
            for registry, entries in zip(REGISTRIES, before, strict=True):
                registry._entries = entries
            for name in modules:
                sys.modules.pop(name, None)
