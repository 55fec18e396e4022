"""What a saved cache holds of an index."""

from __future__ import annotations

import torch

from kvloom.recall import Finder


class CountingFinder(Finder):
    """An index with tensors of its own, one of which is not there yet, and a counter."""

    tensors = ("means", "later")
    counters = ("updates",)

    def __init__(self):
        super().__init__()
        self.means, self.updates = None, 0


def test_a_saved_index_has_its_tokens_tensors_and_counters():
    finder, loaded = CountingFinder(), CountingFinder()
    finder.tokens, finder.means, finder.updates = 5, torch.ones(1, 2, 3, 4), 7
    loaded.load_state(finder.state(), None)
    assert (loaded.tokens, loaded.updates, loaded.later) == (5, 7, None)
    assert loaded.means is finder.means
