"""Which backend runs: what is chosen, what is said, and that whole caches do not care."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature

import pytest
import torch

import steps
from kvloom.cache.layer import LayerCache
from kvloom.errors import NoKernel
from kvloom.kernels import dispatch, ops
from kvloom.kernels.append import cpu as cpu_append
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.cpu import attend as cpu_attend
from kvloom.kernels.attend.cpu import prompt as cpu_prompt
from kvloom.kernels.attend.regions import KVView, Region
from kvloom.kernels.attend.triton import decode as triton_decode
from kvloom.kernels.limits import Coverage
from kvloom.kernels.plan import OpPlan
from kvloom.kernels.quantize import triton as triton_pack
from kvloom.kernels.quantize.cpu import pack as cpu_pack
from kvloom.kernels.score import cpu as cpu_score
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import resolve
from kvloom.store import LayerEncoding, Packed, Store
from sampling import slow_except


@pytest.fixture(autouse=True)
def _auto(monkeypatch):
    monkeypatch.delenv("KVLOOM_KERNELS", raising=False)
    dispatch.environment.cache_clear()
    dispatch.ran.clear()
    yield
    monkeypatch.undo()
    dispatch.environment.cache_clear()


def drawn(hq=4, hk=2, t=1, n=40, d=32):
    return torch.randn(1, hq, t, d), torch.randn(1, hk, n, d), torch.randn(1, hk, n, d)


def views(q, k, v):
    return q, [Region.exact(k, v)]


def attend(q, k, v, **options):
    given = views(q, k, v)
    bound = ops.attend.choose(*given)
    return None if bound.kernel is None else bound.run(*given, 0.2, **options)


def refusal(q, k, v):
    return ops.attend.choose(*views(q, k, v)).why


def test_a_covered_case_is_run_by_the_kernel_and_counted():
    q, k, v = drawn()
    got = attend(q, k, v)
    torch.testing.assert_close(got, ref.attend_exact(q, k, v, 0.2), rtol=0, atol=2e-6)
    assert dispatch.ran == {("attend", "cpu", ""): 1}
    assert dispatch.compile_seconds() > 0


def test_what_is_left_to_the_reference_says_why():
    q, k, v = drawn()
    ops.attend(*views(*drawn(d=40)), 0.2)
    with dispatch.use("ref"):
        ops.attend(*views(q, k, v), 0.2)
    ops.attend(*views(q.requires_grad_(), k, v), 0.2)
    said = [why for _, backend, why in dispatch.ran if backend == "ref"]
    assert said == [
        "head_dim=40 is not a multiple of 16, up to 512",
        "the setting selects the reference",
        "q requires a gradient; call under torch.no_grad()",
    ]


def test_a_question_counts_nothing_and_each_run_counts_one():
    given = views(*drawn())
    for choose in (ops.attend.choose, OpPlan(ops.attend).choose):
        for setting, why in (("auto", ""), ("ref", "the setting selects the reference")):
            dispatch.ran.clear()
            with dispatch.use(setting):
                bound = choose(*given)
            assert dispatch.ran == {}
            for _ in range(2):
                bound.run(*given, 0.2)
            assert dispatch.ran == {("attend", bound.backend, why): 2}


def test_a_device_without_kernels_is_left_to_the_reference():
    assert refusal(*(x.to("meta") for x in drawn())) == "there are no kernels for meta"


def test_the_environment_and_a_block_choose(monkeypatch):
    case = drawn()
    assert refusal(*case) == ""
    monkeypatch.setenv("KVLOOM_KERNELS", "ref")
    assert dispatch.setting() == "auto", "it is read once"
    dispatch.environment.cache_clear()
    assert refusal(*case) == "the setting selects the reference"
    with dispatch.use("auto"):
        assert refusal(*case) == ""
    assert dispatch.setting() == "ref"
    monkeypatch.setenv("KVLOOM_KERNELS", "fast")
    dispatch.environment.cache_clear()
    with pytest.raises(NoKernel, match="unknown kernel backend 'fast'; choose one of auto, ref"):
        dispatch.setting()
    with pytest.raises(NoKernel, match="unknown kernel backend 'cuda'"), dispatch.use("cuda"):
        pass


def test_an_operation_is_bound_once_per_case_and_again_when_the_case_changes():
    q, k, v = drawn()
    views = [[Region.exact(k, v)]]
    first = ops.attend.choose(q, *views)
    assert ops.attend.choose(q, *views) is first
    longer = [[Region.exact(k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))]]
    assert ops.attend.choose(q, *longer) is first, "more tokens are the same case"
    assert ops.attend.choose(q.repeat(1, 2, 1, 1), *views) is not first
    half = [[Region.exact(k.half(), v.half())]]
    assert ops.attend.choose(q, *half) is not first
    with dispatch.use("ref"):
        assert ops.attend.choose(q, *views).backend == "ref"


@pytest.mark.parametrize("wide", ["values", "a later region"])
def test_attention_to_exact_tokens_of_two_dtypes_is_left_to_the_reference(wide):
    q, k, v = drawn()
    narrow = [k.half(), v.half()]
    regions, same = [Region.exact(narrow[0], v)], [Region.exact(*narrow)]
    if wide != "values":
        regions = [*same, Region.exact(k, v, step_tokens=1)]
        same = [*same, Region.exact(*narrow, step_tokens=1)]
    ops.attend(q, same, 0.2)  # another case
    got = ops.attend(q, regions, 0.2)
    assert torch.equal(got.out, ref.attend_regions(q, regions, 0.2).out)
    why = "exact tokens have different dtypes: torch.float16, torch.float32"
    assert dispatch.ran["attend", "ref", why] == 1


def test_a_kernel_that_fails_to_load_leaves_the_case_to_the_reference_visibly(monkeypatch):
    def bind(*_):
        raise RuntimeError("no compiler")

    broken = {"cpu": ops.attend.backends["cpu"]._replace(bind=bind)}
    monkeypatch.setattr(ops.attend, "backends", broken)
    monkeypatch.setattr(ops.attend, "bindings", {})
    q, k, v = drawn()
    views = [[Region.exact(k, v)]]
    with pytest.warns(UserWarning, match="no compiler; the reference runs it"):
        got = ops.attend(q, *views, 0.2)
    assert torch.equal(got.out, ref.attend_exact(q, k, v, 0.2).out)
    why = "its cpu kernel failed to load: RuntimeError: no compiler"
    assert dispatch.ran == {("attend", "ref", why): 1}
    ops.attend(q, *views, 0.2)  # warns once
    assert dispatch.ran == {("attend", "ref", why): 2}


class Lattice:
    """A scheme from elsewhere, which shares no field with `Encoding`."""


def test_a_backend_refuses_a_scheme_and_a_format_that_it_does_not_know_by_name():
    x = torch.zeros(1, 1, 1, 16)
    layer_encoding = LayerEncoding(Lattice(), 1, 16)
    bound = ops.pack.choose(x, layer_encoding)
    assert (bound.backend, bound.why) == ("ref", "Lattice is not supported")
    view = KVView(None, x, Lattice())
    bound = ops.attend.choose(x, [Region(view, KVView(None, x))])
    assert (bound.backend, bound.why) == ("ref", "keys: Lattice is not supported")
    assert "Lattice is not supported" in triton_pack.COVERAGE.problems(layer_encoding, x.dtype)
    found = triton_decode.problems(1, x, None, Lattice())
    assert "values: Lattice is not supported" in found


@pytest.fixture
def doubled(monkeypatch):
    """A backend from another distribution: it covers one query head and returns out = 2."""
    monkeypatch.setattr(dispatch, "_registered", {})
    for op in ops.OPS.values():
        monkeypatch.setattr(op, "backends", dict(op.backends))
        monkeypatch.setattr(op, "bindings", {})

    def run(q, regions, scale, **options):
        return ref.AttentionState(torch.full_like(q, 2.0), q[..., 0])

    def many_heads(q, regions, *_, **__):
        return None if q.shape[1] == 1 else f"{q.shape[1]} query heads are more than one"

    return dispatch.Backend(lambda *_, **__: run, Coverage(("one query head", many_heads)))


def test_auto_tries_a_registered_backend_first_on_its_device(doubled):
    one, four = drawn(1, 1), drawn()
    assert attend(*one).out.amax() != 2
    ops.OPS["attend"].register("doubled", doubled)
    assert (attend(*one).out == 2).all()
    want = ref.attend_exact(*four, 0.2)
    torch.testing.assert_close(attend(*four), want, rtol=0, atol=2e-6)
    refused = "doubled: 4 query heads are more than one"
    assert dispatch.ran == {
        ("attend", "cpu", ""): 1,
        ("attend", "doubled", ""): 1,
        ("attend", "cpu", refused): 1,
    }
    with dispatch.use("ref"):
        assert attend(*one) is None
    assert ops.lowest.choose(torch.rand(1, 1, 9)).backend == "cpu", "it has no such operation"


def test_a_registered_backend_can_be_selected_by_name(doubled, monkeypatch):
    with pytest.raises(NoKernel, match="unknown kernel backend 'doubled'"), dispatch.use("doubled"):
        pass
    ops.attend.register("doubled", doubled)
    monkeypatch.setenv("KVLOOM_KERNELS", "doubled")
    dispatch.environment.cache_clear()
    assert dispatch.setting() == "doubled"
    assert (attend(*drawn(1, 1)).out == 2).all()
    assert refusal(*drawn()) == "4 query heads are more than one"
    assert attend(*drawn()) is None, "the reference runs what a selected backend does not"
    bound = ops.lowest.choose(torch.rand(1, 1, 9))
    assert (bound.backend, bound.why) == ("ref", "there is no doubled kernel for it")


def test_a_registered_backend_of_another_device_is_left_alone(doubled):
    ops.attend.register("doubled", doubled, device="cuda")
    assert ops.attend.choose(*views(*drawn(1, 1))).backend == "cpu"
    with dispatch.use("doubled"):
        assert refusal(*drawn(1, 1)) == "doubled runs on cuda, not cpu"


def test_a_registered_backend_that_raises_is_skipped_with_the_reason(doubled):
    def bind(*_, **__):
        raise OSError("no library")

    ops.attend.register("doubled", doubled._replace(bind=bind))
    one = drawn(1, 1)
    why = "doubled: its doubled kernel failed to load: OSError: no library"
    with pytest.warns(UserWarning, match="attend: .* no library; another backend runs it"):
        got = attend(*one)
    torch.testing.assert_close(got, ref.attend_exact(*one, 0.2), rtol=0, atol=2e-6)
    attend(*one)  # warns once
    assert dispatch.ran == {("attend", "cpu", why): 2}


@pytest.mark.parametrize("name", ["auto", "ref", "cpu", "gpu", "doubled"])
def test_a_name_that_is_taken_is_refused_and_nothing_is_registered(doubled, name):
    ops.attend.register("doubled", doubled)
    before = dict(ops.attend.backends)
    with pytest.raises(NoKernel, match=f"{name!r} exists for 'attend'; use another name"):
        ops.attend.register(name, doubled)
    with pytest.raises(NoKernel, match="'doubled' runs on cpu, not cuda"):
        ops.pack.register("doubled", doubled, device="cuda")
    assert ops.attend.backends == before
    assert "doubled" not in ops.pack.backends


def test_every_operation_says_what_its_backends_cover():
    for name, op in ops.OPS.items():
        assert op.backends, name
        assert set(op.backends) <= {"cpu", "gpu"}, name
        assert all(str(backend.coverage) for backend in op.backends.values()), name


def test_every_backend_has_the_signature_of_its_reference():
    bound = {
        "append": (cpu_append.append,),
        "attend": (cpu_attend.BoundCall.run,),
        "attend_prompt": (cpu_prompt.attend, cpu_prompt.fused),
        "pack": (cpu_pack.Packer.__call__,),
        "column_mass": (cpu_score.column_mass,),
    }
    for name, op in ops.OPS.items():
        want = list(signature(op.reference).parameters.values())
        for backend in op.backends.values():
            run = getattr(backend.bind, "run", None)
            for one in bound[name] if run is None else (run,):
                got = [x for x in signature(one).parameters.values() if x.name != "self"]
                assert got == want, f"{name}: {one.__module__}"


def test_kernels_work_where_no_code_can_be_cached(monkeypatch):
    from numba.core import caching

    from kvloom.kernels import cpu_runtime as team
    from kvloom.kernels.append import cpu
    from kvloom.kernels.append import cpu_kernel as append_kernel
    from kvloom.kernels.append.reference import WriteTarget

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    made = append_kernel.kernel.__wrapped__(4)
    assert isinstance(made, team.Kernel)
    monkeypatch.setattr(cpu, "compiled", lambda _: made)
    _, k, v = drawn(t=1, n=1)
    targets = tuple(WriteTarget(torch.zeros(1, 2, 4, 32), 3) for _ in range(2))
    assert cpu.append((k, v), targets)
    for x, target in zip((k, v), targets, strict=True):
        assert torch.equal(target.data[:, :, 3:], x)
        assert not target.data[:, :, :3].any()


@pytest.mark.parametrize("threads", [1, 3])
def test_python_threads_do_where_torch_has_no_openmp(monkeypatch, threads):
    from kvloom.kernels import cpu_runtime as team

    q, k, v = drawn(n=9000)
    attend(*drawn())
    monkeypatch.setattr(team, "_openmp", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.testing.assert_close(attend(q, k, v), ref.attend_exact(q, k, v, 0.2), rtol=0, atol=2e-6)


def test_numba_waits_for_the_first_step_that_needs_it():
    code = (
        "import sys, torch\n"
        "from kvloom.cache.layer import LayerCache\n"
        "from kvloom.recipe.resolve import resolve\n"
        "cache = LayerCache(resolve('full'))\n"
        "for t in (9, 2):\n"
        "    x = torch.randn(1, 1, t, 32)\n"
        "    print('numba' in sys.modules)\n"
        "    with torch.no_grad(): cache.attend(x, x, x, scale=1.0)\n"
        "print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


WHOLE = {
    "full": resolve("full"),
    "kivi": resolve("kivi:group=32,residual=32"),
    "swapped axes": steps.RECIPES["swapped axes"],
    "sinks": Recipe(
        store=Store(Packed(2, "channel", 32, residual=32), Packed(2, "token", 32)),
        protect=Protect(3, exact_recent=(0, 32)),
    ),
    "streaming": resolve("streaming:tokens=24,sinks=4"),
}


@pytest.mark.parametrize("recipe", slow_except(WHOLE, "full", "sinks", "streaming"))
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_cache_attends_alike_by_kernels_and_by_the_reference(recipe, padded):
    sizes = [50, *[1] * 40, 3, 20, 1, 1]
    q, k, v = steps.draw(0, sum(sizes), batch=2, hq=2, hk=1)
    visible = steps.padded([0, 17], sum(sizes)) if padded else None
    outs = []
    for backend in dispatch.CHOICES:
        with dispatch.use(backend), torch.no_grad():
            outs.append(steps.feed(LayerCache(recipe), q, k, v, sizes, visible))
    real = slice(17 if padded else 0, None)  # what padding attends to does not matter
    torch.testing.assert_close(outs[0][:, :, real], outs[1][:, :, real], rtol=0, atol=4e-6)
    assert dispatch.ran["attend", "cpu", ""] >= 43


def test_alibi_softcap_and_drafts_too():
    sizes = [70, 1, 1, 4, 1]
    q, k, v = steps.draw(0, sum(sizes), batch=2, hq=4, hk=2)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    outs = []
    for backend in dispatch.CHOICES:
        with dispatch.use(backend), torch.no_grad():
            cache = LayerCache(WHOLE["kivi"])
            outs.append(steps.feed(cache, q, k, v, sizes, softcap=5.0, slopes=slopes))
    torch.testing.assert_close(*outs, rtol=0, atol=4e-6)
    assert dispatch.ran["attend", "cpu", ""] == 4
