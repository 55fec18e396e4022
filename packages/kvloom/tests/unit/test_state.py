"""Stateful: what a part declares is counted, moved, saved, loaded and undone."""

from __future__ import annotations

import copy

import pytest
import torch

from kvloom.state import Stateful, StepParts, Undo


class Leaf(Stateful):
    tensors = ("x",)
    counters = ("n",)

    def __init__(self, rows: int = 0) -> None:
        self.n, self.x = rows, torch.arange(float(rows)) if rows else None


class Branch(Stateful):
    children = ("leaf",)
    fixed = True

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf


class Tree(Stateful):
    tensors = ("several", "missing")
    uncounted = ("mask",)
    children = ("branch", "leaves", "none")

    def __init__(self) -> None:
        self.several = [torch.ones(3), torch.zeros(3)]
        self.mask = torch.tensor([True, False, True])
        self.branch, self.leaves, self.none = Branch(Leaf(3)), [Leaf(3), Leaf()], None


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_bytes_are_those_of_the_counted_tensors(tree):
    assert tree.nbytes == 4 * (3 + 3 + 3 + 3)


def test_every_tensor_is_moved(tree):
    tree.map(lambda x: x[[2, 0]])
    assert tree.mask.tolist() == [True, True]
    assert [x.tolist() for x in tree.several] == [[1, 1], [0, 0]]
    assert tree.branch.leaf.x.tolist() == tree.leaves[0].x.tolist() == [2, 0]
    assert tree.leaves[1].x is None


def test_a_saved_state_is_loaded(tree):
    saved, empty = copy.deepcopy(tree.state()), Tree()
    assert saved["none"] is None
    assert saved["missing"] is None
    empty.branch.leaf, empty.leaves = Leaf(), [Leaf(), Leaf()]
    empty.load_state(saved, None)
    assert empty.nbytes == tree.nbytes
    assert empty.leaves[0].n == 3
    assert torch.equal(empty.branch.leaf.x, tree.branch.leaf.x)


def test_a_step_is_undone_in_every_part_that_changes(tree):
    assert tree.walk() == [tree, tree.branch.leaf, *tree.leaves]
    undo = Undo(StepParts(tree.walk(), None, None))
    tree.leaves[1].n, tree.branch.leaf.x, tree.leaves = 7, None, []
    undo.restore()
    assert [leaf.n for leaf in tree.leaves] == [3, 0]
    assert tree.branch.leaf.x is not None
