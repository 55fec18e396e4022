"""Budget, Keep, and the check of what scores return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from floor import short_prompts_evict
from kvloom.errors import RecipeError
from kvloom.keep import SCORERS, Budget, Keep, Mass, Outliers, Recent, Scorer, Step, checked

__all__ = ["short_prompts_evict"]


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


@pytest.mark.floor
@pytest.mark.parametrize(
    ("budget", "prompt", "tokens"),
    [
        (Budget(tokens=7), 3, 7),
        (Budget(tokens=7), 300, 7),
        (Budget(fraction=0.5), 309, 154),
        (Budget(fraction=1), 309, 309),
        (Budget(fraction=0.5, recent=0.5, round_shares=True), 303, 150),
        (Budget(fraction=0.5, recent=0.9, round_shares=True), 300, 150),
        (Budget(fraction=0.5, recent=7, round_shares=True), 303, 151),
        (Budget(tokens=51, recent=0.5, round_shares=True), 103, 51),
        (Budget(fraction=0.5), 3, 128),  # the floor
        (Budget(fraction=0.5), 257, 128),
        (Budget(fraction=0.1, recent=0.5, round_shares=True), 1200, 128),
    ],
)
def test_a_budget_in_tokens(budget, prompt, tokens):
    assert budget.resolve(prompt) == tokens


@pytest.mark.parametrize(
    ("budget", "prompt", "window"),
    [
        (Budget(tokens=10), 300, 10),
        (Budget(tokens=10, recent=0.25), 300, 2),
        (Budget(tokens=10, recent=4, round_shares=True), 300, 4),
        (Budget(fraction=0.5, recent=0.3), 107, 15),  # 0.3 of 53
        (Budget(fraction=0.5, recent=0.3, round_shares=True), 107, 16),  # 0.15 of 107
        (Budget(fraction=0.5, recent=20), 107, 20),
        (Budget(fraction=0.1, recent=64), 100, 5),  # a number takes half of a fraction at most
        (Budget(fraction=0.1, recent=1.0), 100, 10),
    ],
)
def test_a_recent_window_in_tokens(budget, prompt, window):
    assert budget.recent_of(prompt) == window


@pytest.mark.parametrize(("heavy", "recent"), [(0.1, 0.3), (0.3, 0.1), (0.07, 0.13), (0.45, 0.05)])
def test_rounded_shares_are_those_of_the_prompt(heavy, recent):
    fraction = round(heavy + recent, 12)
    budget = Budget(fraction=fraction, recent=recent / fraction, round_shares=True)
    for n in range(1000, 3000):
        assert budget.recent_of(n) == int(n * recent)
        assert budget.resolve(n) == int(n * heavy) + int(n * recent)


def test_an_unknown_scorer_is_refused():
    with pytest.raises(RecipeError, match="scorer='mass' is not one of recent, dilated, mass"):
        Keep(Budget(tokens=8), scorer="mass")


# --- scores that are refused ---------------------------------------------------------------------


@dataclass(frozen=True)
class Mine(Scorer):
    """A score that returns what a test sets."""

    kind: ClassVar[str] = "mine"
    returns: ClassVar[object] = None

    def __call__(self, step: Step) -> torch.Tensor:
        return self.returns


def step(tokens: int = 5) -> Step:
    q, k = torch.randn(2, 4, tokens, 8), torch.randn(2, 2, tokens, 8)
    index = torch.arange(tokens).view(1, 1, -1)
    return Step(q, k, k, 1.0, index, tokens)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (torch.zeros(2, 2, 4), "returned float32 [2, 2, 4]; return float32 [2, 2, 5]: rows, key"),
        (torch.zeros(2, 4, 5), "returned float32 [2, 4, 5]; return float32 [2, 2, 5]"),
        (torch.zeros(2, 2, 5, 1), "returned float32 [2, 2, 5, 1]"),
        (torch.zeros(2, 2, 5, dtype=torch.bfloat16), "returned bfloat16 [2, 2, 5]; return float32"),
        (torch.zeros(2, 2, 5, dtype=torch.int64), "returned int64 [2, 2, 5]"),
        (torch.full((2, 2, 5), torch.nan), "returned NaN; return numbers, or infinity"),
        (torch.zeros(2, 2, 5, device="meta"), "returned scores on meta; return cpu"),
        ([1.0], "returned list, not a tensor"),
        (None, "returned NoneType, not a tensor"),
    ],
)
def test_a_score_that_returns_something_else_is_refused_by_name(monkeypatch, returned, says):
    monkeypatch.setattr(Mine, "returns", returned)
    for rule, name in ((Mine(), "mine"), (lambda step: returned, "<lambda>")):
        with pytest.raises(RecipeError) as refused:
            checked(rule, step())
        assert str(refused.value).startswith(f"score {name!r} {says}")


def test_infinite_scores_are_accepted(monkeypatch):
    scores = torch.tensor([[[torch.inf, -torch.inf, 0.0, 1.0, 2.0]] * 2] * 2)
    monkeypatch.setattr(Mine, "returns", scores)
    assert checked(Mine(), step()) is scores


@pytest.mark.parametrize("kind", [kind for kind in SCORERS if kind != "recent"])  # age decides
def test_built_in_scores_pass_as_they_are(kind):
    score, one = SCORERS[kind](), step()
    assert torch.equal(checked(score, one), score(one))


def test_a_class_with_the_name_of_a_built_in_score_is_checked_for_nan():
    class Masked(Mass):
        def __call__(self, step: Step) -> torch.Tensor:
            return torch.full((2, 2, 5), torch.nan)

    with pytest.raises(RecipeError, match="score 'mass' returned NaN"):
        checked(Masked(), step())


def test_a_score_receives_the_values():
    x = step()
    norms = checked(lambda step: step.v.norm(dim=-1), x)
    assert torch.equal(norms, x.v.norm(dim=-1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Keep(Budget(20), Recent(), when="prompt"), "evicts at every step, and not once"),
        (lambda: Keep(Budget(20, layers="pyramid"), Recent()), "the same tokens in all layers"),
        (lambda: Outliers(4, Recent()), "score 'recent' has no outliers"),
    ],
)
def test_what_age_cannot_decide_is_refused(build, message):
    with pytest.raises(RecipeError, match=message):
        build()
