"""Combinations of keep, store and recall on a whole model, against attention in float64.

A small form of benchmarks/combinations.py: each step of each layer attends to exactly the tokens
that the layer holds or recalls, and what it holds are the model's own keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

import kvloom
import probe
import tiny
from held import check
from kvloom.cache import cycle
from kvloom.errors import RecipeError
from kvloom.hf import rotary
from kvloom.keep import SCORERS, Budget, Keep
from kvloom.recall import Clusters, Pages, PartialKeys, Recall, Tier, TopK
from kvloom.recipe import Protect, Recipe, resolve
from sampling import set_cover

PROMPT, STEPS = 150, (*[1] * 4, 5, 1, 70, 1, 1)
BUDGET = Budget(tokens=110, recent=10)


def once(score: str, budget=BUDGET, **options) -> Keep:
    return Keep(budget, SCORERS[score](), when="prompt", **options)


KEEPS = {
    "-": None,
    "mass": once("mass"),
    "observation": once("observation"),
    "reconstruction": once("reconstruction"),
    "expected": once("expected"),
    "shared": once("mass", shared=True),
    "heads": once("observation", budget=replace(BUDGET, head_share=0.2)),
    "heads of all layers": once("mass", budget=replace(BUDGET, head_share=0.0, layers="joint")),
    "renumbered": once("mass", positions="renumbered"),
    "every step": Keep(BUDGET, SCORERS["mass"]()),
    "every step, renumbered": Keep(BUDGET, SCORERS["mass"](), positions="renumbered"),
    "window, renumbered": Keep(Budget(110), SCORERS["recent"](), positions="renumbered"),
}
STORES = {
    "-": resolve("full"),
    "kivi": resolve("kivi:group=32,residual=32"),
    "rtn": resolve("rtn:bits=3,group=16"),
    "turbo": resolve("turbo:window=5"),
    "near-lossless": resolve("near-lossless:group=16,residual=32"),
    "minikv": resolve("minikv:residual=32"),
}


def recall(index, group: str = "mean", tier: str = "") -> Recall:
    return Recall(index, 80, group, full_layers=0, tier=Tier(tier) if tier else None)


RECALLS = {
    "-": None,
    "clusters": recall(Clusters(8, block=16, block_clusters=3), "turns"),
    "pages": recall(Pages(4), "each"),
    "topk": recall(TopK(), "max"),
    "partial": recall(PartialKeys(0.3, block=16)),
    "host": recall(Pages(16), tier="host"),
}


KINDS = {  # of parts that a layer treats alike
    "mass": "once", "observation": "once", "reconstruction": "once", "expected": "once",
    "heads": "heads", "heads of all layers": "heads", "renumbered": "renumbered",
    "every step, renumbered": "renumbered", "window, renumbered": "renumbered",
    "topk": "index", "partial": "index", "clusters": "index", "pages": "index",
    "kivi": "channels", "near-lossless": "channels",
    "rtn": "tokens", "turbo": "tokens", "minikv": "tokens",
}  # fmt: skip


def kinds(case: dict) -> dict:
    """A case whose parts are kinds of parts."""
    return {axis: KINDS.get(part, part) for axis, part in case.items()}


def pairs(case: dict) -> set:
    """Every two parts of a case."""
    return set(combinations(case.items(), 2))


def made(keep: str, store: str, recall: str, sinks: int) -> Recipe | None:
    """The recipe of these parts, or None where recipes refuse it."""
    stored = STORES[store]
    try:
        protect = Protect(max(sinks, stored.protect.sinks), stored.protect.exact_recent)
        return Recipe(KEEPS[keep], stored.store, RECALLS[recall], protect, "mixed")
    except RecipeError:
        return None


AXES = {"keep": KEEPS, "store": STORES, "recall": RECALLS, "sinks": (0, 4), "padded": (False, True)}
CASES = [
    dict(zip(AXES, values, strict=True))
    for values in product(*AXES.values())
    if made(*values[:-1]) and not (values[-1] and "renumbered" in values[0])
]
# Every pair of parts is in some case; by default, every pair of kinds of parts, and every part.
PAIRS = [CASES[i] for i in sorted(set_cover([pairs(case) for case in CASES]))]
DEFAULT = set_cover([pairs(kinds(case)) | set(case.items()) for case in PAIRS])
every = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id="-".join(map(str, case.values())),
            marks=[pytest.mark.rare, *([] if i in DEFAULT else [pytest.mark.slow])],
        )
        for i, case in enumerate(PAIRS)
    ],
)


@pytest.fixture(scope="module")
def model():
    return tiny.llama(head_dim=32)


def run(model, recipe: Recipe, padded: bool = False, spoil=None):
    """What is found; spoil: changes the cache after the prompt."""
    ids = torch.randint(
        3, 200, (2, PROMPT + sum(STEPS)), generator=torch.Generator().manual_seed(3)
    )
    mask = torch.ones_like(ids)
    mask[1, : 40 if padded else 0] = 0
    cache, at = kvloom.Cache(model, recipe), 0
    found = check(cache, rotary.layer_ropes(model)[0])
    with torch.no_grad():
        for t in (PROMPT, *STEPS):
            some = {"input_ids": ids[:, at : at + t]} | (
                {"attention_mask": mask[:, : at + t]} if padded else {}
            )
            model(**some, past_key_values=cache)
            if spoil is not None and not at:
                spoil(probe.layers(cache)[0])
            at += t
    assert found.steps == len(probe.layers(cache)) * (1 + len(STEPS))
    assert found.recalls or recipe.recall is None
    return found


@every
def test_each_step_is_attention_in_float64_over_what_the_cache_holds(model, case):
    keep, store, recall, sinks, padded = case.values()
    found = run(model, made(keep, store, recall, sinks), padded)
    assert not found.wrong
    assert found.attention < 2**-22
    assert found.stored < 1e-6


def a_key(layer):
    probe.keys(layer).tail.view()[0, 0, -1, 3] += 0.1


def a_code(layer):
    probe.values(layer).packed.live.codes[0, 0, 0, 3] ^= 1


def a_place(layer):
    probe.tokens(layer).logical_index[0, 0, 5] += 1


@pytest.mark.rare
@pytest.mark.parametrize(
    ("spoil", "form"),
    [
        (a_key, ("-", "kivi", "-", 0)),
        (a_code, ("-", "kivi", "-", 0)),
        (a_place, ("mass", "kivi", "-", 0)),
    ],
)
def test_the_check_sees_a_wrong_token(model, spoil, form):
    assert run(model, made(*form), spoil=spoil).stored > 1e-3


def test_the_check_sees_a_token_that_is_not_read(model, monkeypatch):
    real = cycle.step_regions

    def one_less(*args):
        region = real(*args)[0]
        visible = torch.ones(2, 1, region.tokens, dtype=torch.bool)
        visible[..., 20] = False
        return [region._replace(visible=visible)]

    monkeypatch.setattr(cycle, "step_regions", one_less)
    assert run(model, made("mass", "-", "-", 0)).attention > 1e-5
