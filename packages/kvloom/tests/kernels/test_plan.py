"""kernels.plan: a layer's operation is bound once, again when its case changes, never by half."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.regions import KVView, Region
from kvloom.kernels.plan import OpPlan
from kvloom.store import Packed
from kvloom.store.kv_side import KVSide
from sampling import slow_except

KEYS = Packed(2, "channel", 32, residual=32)
VALUES = Packed(2, "token", 32)


@pytest.fixture(autouse=True)
def _auto():
    with dispatch.use("auto"):
        dispatch.ran.clear()
        yield


def one(keys, values, step_tokens=0):
    return [Region(keys, values, step_tokens=step_tokens)]


def bindings(monkeypatch):
    """Count how often plans of attention are bound."""
    made, bind = [], OpPlan._bound

    def counted(self, *args, **options):
        if self.op is ops.attend:
            made.append(args)
        return bind(self, *args, **options)

    monkeypatch.setattr(OpPlan, "_bound", counted)
    return made


def packed(tokens=200, h=2, d=32, dtype=torch.float32):
    """Keys and values as KIVI stores them."""
    sides = KVSide(KEYS, 0), KVSide(VALUES, 32)
    for side in sides:
        side.extend(torch.randn(1, h, tokens, d).to(dtype), 0)
    return sides


def grow(sides, h=2, d=32):
    """Add a token and pack what is due, as a decode step does."""
    for side in sides:
        x = torch.randn(1, h, 1, d)
        side.tail.append(x.to(side.tail.view().dtype))
        side.pack()


def ran(operation):
    return {tuple(rest): n for (name, *rest), n in dispatch.ran.items() if name == operation}


def close(got, q, keys, values, **options):
    want = ref.attend_exact(q, keys.tensor().float(), values.tensor().float(), 0.2, **options)
    torch.testing.assert_close(got, want, rtol=0, atol=4e-6)
    assert want.out.abs().max() > 0.01


def test_a_plan_is_bound_once_while_tokens_are_packed_and_storage_grows(monkeypatch):
    made, sides, attend = bindings(monkeypatch), packed(), OpPlan(ops.attend)
    for _ in range(70):
        grow(sides)
        q, (keys, values) = torch.randn(1, 4, 1, 32), (side.kv_view() for side in sides)
        close(attend(q, one(keys, values, q.shape[2]), 0.2), q, keys, values, causal=True)
    assert len(made) == 1
    assert ran("attend") == {("cpu", ""): 70}


def test_a_prefix_that_was_replaced_at_the_same_length_is_read_anew(monkeypatch):
    made, attend, q = bindings(monkeypatch), OpPlan(ops.attend), torch.randn(1, 4, 1, 32)
    for _ in range(3):
        keys, values = (side.kv_view() for side in packed())
        close(attend(q, one(keys, values), 0.2), q, keys, values)
        rows = keys._replace(packed=keys.packed._replace(scale=keys.packed.scale * 2))
        close(attend(q, one(rows, values), 0.2), q, rows, values)
    assert len(made) == 1


def test_outgrown_storage_is_not_kept_alive():
    import weakref

    attend, sides = OpPlan(ops.attend), packed()
    keys, values = (side.kv_view() for side in sides)
    attend(torch.randn(1, 4, 1, 32), one(keys, values), 0.2)
    storage = [weakref.ref(x) for x in (keys.packed.codes, values.packed.codes, keys.tail)]
    del keys, values, sides
    assert [x() for x in storage] == [None] * 3


def test_what_a_step_returned_is_not_changed_by_the_next():
    attend, (keys, values) = OpPlan(ops.attend), (side.kv_view() for side in packed())
    q = torch.randn(2, 1, 4, 1, 32)
    first = attend(q[0], one(keys, values), 0.2, products=True)
    kept = [x.clone() for x in first]
    attend(q[1], one(keys, values), 0.2, products=True)
    for x, y in zip(kept, first, strict=True):
        assert torch.equal(x, y)


def changed(q, keys, values):
    """Cases that differ from that of q, keys and values in one respect."""
    more = q.repeat(1, 2, 1, 1), keys, values
    tokens = q.repeat(1, 1, 3, 1), keys, values
    exact = KVView(None, keys.tail), KVView(None, values.tail[:, :, : keys.tail.shape[2]])
    half = [view._replace(exact=view.exact.half()) for view in (keys, values)]
    wide = [KVView(None, torch.randn(1, 2, 9, 64)) for _ in range(2)]
    return {
        "query heads": more,
        "queries": tokens,
        "formats": (q, *exact),
        "dtype": (q, *half),
        "head dimension": (torch.randn(1, 4, 1, 64), *wide),
    }


CASES = ["query heads", "queries", "formats", "dtype", "head dimension"]


# The others compile kernels, too.
@pytest.mark.parametrize("what", slow_except(CASES, "query heads", "queries", "formats"))
def test_another_case_is_bound_anew_and_the_first_one_again(monkeypatch, what):
    made, attend, q = bindings(monkeypatch), OpPlan(ops.attend), torch.randn(1, 4, 1, 32)
    first = q, *(side.kv_view() for side in packed())
    for case in (first, changed(*first)[what], first):
        close(attend(case[0], one(*case[1:]), 0.2), *case)
    assert len(made) == 3


def test_batch_and_threads_are_not_part_of_a_case(monkeypatch):
    made, attend = bindings(monkeypatch), OpPlan(ops.attend)
    for batch, threads in ((1, 1), (3, 1), (3, 4), (2, 4)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        q, k, v = (torch.randn(batch, h, n, 32) for h, n in ((4, 1), (2, 3000), (2, 3000)))
        keys, values = KVView(None, k), KVView(None, v)
        close(attend(q, one(keys, values), 0.2), q, keys, values)
    assert len(made) == 1


def test_the_setting_and_a_gradient_bind_the_reference_and_say_why():
    attend, q = OpPlan(ops.attend), torch.randn(1, 4, 1, 32)
    keys, values = (side.kv_view() for side in packed())
    attend(q, one(keys, values), 0.2)
    assert attend.bound.backend == "cpu"
    with dispatch.use("ref"):
        assert attend.choose(q, one(keys, values)).kernel is None
        close(attend(q, one(keys, values), 0.2), q, keys, values)
    assert attend.bound.backend == "ref"
    assert attend.choose(q, one(keys, values)).kernel is not None
    assert attend.choose(q.clone().requires_grad_(), one(keys, values)).kernel is None
    assert attend.bound.why == "q requires a gradient; call under torch.no_grad()"
    assert ran("attend") == {
        ("cpu", ""): 1,
        ("ref", "the setting selects the reference"): 1,
    }, "what runs is counted"


def test_a_kernel_that_raises_while_it_is_bound_leaves_the_case_to_the_reference(monkeypatch):
    def bind(*_, **__):
        raise MemoryError("no room")

    broken = {"cpu": ops.attend.backends["cpu"]._replace(bind=bind)}
    attend, q = OpPlan(ops.attend), torch.randn(1, 4, 1, 32)
    keys, values = (side.kv_view() for side in packed())
    attend(q, one(keys, values), 0.2)
    with monkeypatch.context() as patched:
        patched.setattr(ops.attend, "backends", broken)
        patched.setattr(ops.attend, "bindings", {})
        other = q.repeat(1, 2, 1, 1)
        with pytest.warns(UserWarning, match="attend: .* no room; the reference runs it"):
            got = attend(other, one(keys, values), 0.2)
        close(got, other, keys, values)
        attend(other, one(keys, values), 0.2)  # warns once
        assert attend.bound.backend == "ref"
        assert attend.bound.why == "its cpu kernel failed to load: MemoryError: no room"
        assert dispatch.ran["attend", "ref", attend.bound.why] == 2
    close(attend(q, one(keys, values), 0.2), q, keys, values)
    assert attend.bound.backend == "cpu"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_a_plan_of_its_own(again):
    attend, q = OpPlan(ops.attend), torch.randn(1, 4, 1, 32)
    keys, values = (side.kv_view() for side in packed())
    attend(q, one(keys, values), 0.2)
    twin = again(attend)
    assert twin.op is ops.attend
    assert twin.bound is None
    close(twin(q, one(keys, values), 0.2), q, keys, values)
    close(attend(q, one(keys, values), 0.2), q, keys, values)


def test_an_operation_whose_backend_keeps_nothing_has_plans_too():
    scores = torch.rand(1, 2, 9)
    index = torch.arange(9, dtype=torch.int32).expand(1, 2, 9).contiguous()
    lowest = OpPlan(ops.lowest)
    with dispatch.use("ref"):
        want = lowest(scores, index, 5, None)
    assert torch.equal(lowest(scores, index, 5, None), want)
    assert lowest.bound.backend == "cpu"
