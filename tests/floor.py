"""Fractions of the short prompts of tests: a module or folder that imports the fixture evicts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvloom.keep import policy


@pytest.fixture(autouse=True)
def short_prompts_evict(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let fractions of short prompts be small, but for the mark `floor`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("floor") is None:
            patch.setattr(policy, "FLOOR_TOKENS", 2)
        yield
