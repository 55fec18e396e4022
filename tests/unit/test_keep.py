"""Budget and Keep."""

from __future__ import annotations

import pytest

from kvloom.errors import RecipeError
from kvloom.keep import Budget, Keep


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "give one"),
        ({"tokens": 5, "fraction": 0.5}, "give one"),
        ({"tokens": 0}, "tokens=0 must be a whole number, 1 or more"),
        ({"tokens": -4}, "tokens=-4"),
        ({"tokens": 2.5}, "tokens=2.5"),
        ({"tokens": "8"}, "tokens='8'"),
        ({"tokens": True}, "tokens=True"),
        ({"fraction": 0}, r"fraction=0 must lie in \(0, 1\]"),
        ({"fraction": 1.01}, "fraction=1.01"),
        ({"fraction": float("nan")}, "fraction=nan"),
        ({"fraction": "half"}, "fraction='half'"),
    ],
)
def test_a_bad_budget_is_refused(fields, says):
    with pytest.raises(RecipeError, match=says):
        Budget(**fields)


@pytest.mark.parametrize(
    ("budget", "prompt", "tokens"),
    [
        (Budget(tokens=7), 3, 7),
        (Budget(tokens=7), 300, 7),
        (Budget(fraction=0.5), 9, 4),
        (Budget(fraction=1), 9, 9),
        (Budget(fraction=0.1), 3, 1),
        (Budget(fraction=0.5, recent=0.5, apart=True), 103, 50),
        (Budget(fraction=0.5, recent=0.9, apart=True), 100, 50),
        (Budget(fraction=0.5, recent=7, apart=True), 103, 51),
        (Budget(tokens=51, recent=0.5, apart=True), 103, 51),
        (Budget(fraction=0.1, recent=0.5, apart=True), 3, 1),
    ],
)
def test_a_budget_in_tokens(budget, prompt, tokens):
    assert budget.resolve(prompt) == tokens


@pytest.mark.parametrize(
    ("budget", "prompt", "window"),
    [
        (Budget(tokens=10), 300, 10),
        (Budget(tokens=10, recent=0.25), 300, 2),
        (Budget(tokens=10, recent=4, apart=True), 300, 4),
        (Budget(fraction=0.5, recent=0.3), 107, 15),  # 0.3 of 53
        (Budget(fraction=0.5, recent=0.3, apart=True), 107, 16),  # 0.15 of 107
        (Budget(fraction=0.1, recent=64), 100, 10),
    ],
)
def test_a_recent_window_in_tokens(budget, prompt, window):
    assert budget.window(prompt) == window


def test_an_unknown_scorer_is_refused():
    with pytest.raises(RecipeError, match="scorer='mass' is not one of recent, dilated, mass"):
        Keep(Budget(tokens=8), scorer="mass")
