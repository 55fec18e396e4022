"""Any sequence of steps, drafts, crops, moves of rows, copies and interruptions, under any recipe.

`make soak` runs as many such cases as its time allows; those that failed are below.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import by_reference
from kvloom.keep import Budget, Expected, Fit, Keep, Mass, Outliers, Random, Reconstruction, Rotated
from kvloom.recall import Clusters, PartialKeys, Recall, Tier, TopK
from kvloom.recipe import Protect, Recipe
from kvloom.store import Packed, Store
from sequences import Case, case_of, run

pytestmark = by_reference

PACKED_VALUES = Store(values=Packed(bits=2, axis="token", group=16))
FIRST_DRAFT = (("first draft", 30, 5, 3),)
FOUND = {
    "accepted tokens of a first draft that are too few for a pyramid": Case(
        Recipe(Keep(Budget(fraction=0.7125, recent=0.3, layers="pyramid"), Mass(), when="prompt")),
        3, (2, 1), 16, "fp32", (0,), (("first draft", 1, 7, 3),),
    ),
    "values fitted to a repetition's scores after a first draft": Case(
        Recipe(Keep(Budget(12, recent=2), Reconstruction(), when="prompt", fit=Fit(32, 20, 8))),
        1, (2, 1), 16, "fp32", (0,), FIRST_DRAFT,
    ),
    "a fraction of a prompt without the rejected tokens of a first draft": Case(
        Recipe(
            Keep(
                Budget(fraction=0.5, recent=0, head_share=1.0), Rotated(), when="block", block=8
            ),
            compress_after=20,
        ),
        1, (2, 1), 16, "fp32", (0,), FIRST_DRAFT,
    ),
    "sinks of a padded row that are outliers of some heads": Case(
        Recipe(store=PACKED_VALUES, protect=Protect(5, 3, Outliers(35))),
        1, (4, 4), 16, "fp32", (0, 9), (("step", 48),), seed=28,
    ),
    "a variance of one token": Case(
        Recipe(Keep(Budget(8, recent=0, layers="variance"), Mass())),
        2, (2, 1), 16, "fp32", (0,), (("step", 1),),
    ),
    "a row without padding, selected before all sinks have come": Case(
        Recipe(protect=Protect(sinks=5)),
        1, (2, 1), 16, "fp32", (1, 0), (("step", 2), ("select", (1,)), ("step", 2)),
    ),
    "the record of decisions after a reset": Case(
        Recipe(recall=Recall(TopK(), 20, full_layers=0), protect=Protect(sinks=5)),
        1, (2, 1), 16, "fp32", (0,), (("step", 40), ("step", 1), ("reset",), ("step", 1)),
    ),
    "heads whose certain tokens leave less than a unit to win": Case(
        Recipe(
            Keep(Budget(5, recent=0, head_share=0.0), Mass(), when="prompt"),
            Store(keys=Packed(bits=3, axis="token", group=0, residual=15, unit=5)),
        ),
        1, (2, 2), 16, "fp32", (0,), (("step", 8),),
    ),
    "a mask of the sinks alone, after rows without padding have replaced another": Case(
        Recipe(
            Keep(
                Budget(fraction=0.5, recent=1, head_share=0.5), Expected(), when="block", block=4
            ),
            protect=Protect(sinks=4),
        ),
        1, (2, 1), 16, "fp32", (2, 0), (("step", 6), ("reorder", (1, 1)), ("step", 30)),
    ),
    "sinks of a padded row among the tokens that stay of a block": Case(
        Recipe(
            Keep(
                Budget(fraction=0.7, recent=3, head_share=0.2), Random(), when="block", block=29
            ),
            Store(keys=Packed(bits=2, axis="channel", group=16, residual=16)),
            protect=Protect(sinks=3),
        ),
        1, (4, 2), 16, "fp32", (8, 0, 16), (("step", 23), ("step", 7)),
    ),
    "a saved cache whose packed tokens are all in the tier": Case(
        Recipe(
            store=Store(values=Packed(bits=2, axis="channel", group=32, residual=32)),
            recall=Recall(Clusters(4, 16, 1), 65, "mean", full_layers=0, tier=Tier("host")),
        ),
        1, (2, 1), 16, "fp32", (0,), (("step", 32), ("save",)),
    ),
    "ALiBi, where all tokens but the sinks of a padded row are in the tier": Case(
        Recipe(
            recall=Recall(PartialKeys(0.3, 16), 64, full_layers=0, tier=Tier("file")),
            protect=Protect(sinks=2),
        ),
        1, (2, 1), 16, "fp32", (2,), (("step", 3),), alibi=True,
    ),
    "a chunk of a later block whose tokens all lack queries": Case(
        Recipe(
            Keep(
                Budget(fraction=0.3, recent=6, head_share=0.0), Rotated(5), when="block", block=21
            ),
            protect=Protect(sinks=2),
        ),
        1, (2, 1), 16, "fp32", (0,), (("step", 20), ("step", 20)), seed=4064,
    ),
}  # fmt: skip


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_any_sequence(seed):
    run(case_of(seed))


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_the_campaign_has_found(case):
    run(case)
