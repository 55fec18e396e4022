"""Recorded steps give what steps that run give, and no reader of a cache misses their tokens.

Without a GPU, the recorder runs the step again. A CUDA graph is compared in `benchmarks/gpu.py`.
"""

import copy
import gc
import pickle
import weakref
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
import zoo

import kvloom
import kvloom.cache.layer
from kvloom.hf import BatchedCaches, cuda_graphs, recorded_steps

GREEDY = {"max_new_tokens": 24, "do_sample": False}
RECIPES = ("full", "near-lossless:residual=32", "kivi:group=16,residual=32", "small", "snapkv")
TOLERANCE = 1e-4


class Recorder:
    """Runs a function again in place of a replay; counts records and replays."""

    def __init__(self):
        self.records = self.replays = 0

    def __call__(self, run):
        self.records += 1
        with torch.inference_mode(False), torch.no_grad():  # so that every replay can overwrite it
            out = run()

        kept = {name: x for name, x in out.items() if name != "past_key_values"}

        def replay():
            self.replays += 1
            new = run()
            for name, x in kept.items():
                copy_into(x, new[name])

        return replay, out


def copy_into(x, new):
    """Copy a tensor, or those of a tuple, into earlier ones."""
    if isinstance(x, torch.Tensor):
        x.copy_(new)
    else:
        for old, part in zip(x, new, strict=True):
            copy_into(old, part)


def frozen(run):
    """Record a function so that a replay changes nothing."""
    return (lambda: None), run()


@pytest.fixture
def model():
    return zoo.build("llama-gqa")


@contextmanager
def recorded(model, room=8, record=None):
    graphs = recorded_steps.Graphs(record or Recorder(), room)
    with cuda_graphs.replayed(model, graphs):
        yield graphs


def read(model, cache, ids, **options):
    """Read ids after the tokens of a cache; the logits of the last."""
    seen = cache.get_seq_length()
    place = torch.arange(seen, seen + ids.shape[1])[None]
    out = model(ids, position_ids=place, past_key_values=cache, **options)
    return out["logits"][:, -1]


@torch.no_grad()
def decode(model, cache, steps=20, prompt=None, begin=0):
    """Read a prompt, if the cache is empty, and its tokens again one by one."""
    ids = zoo.batch()["input_ids"][:1] if prompt is None else prompt
    logits = [] if cache.get_seq_length() else [read(model, cache, ids)]
    logits += [read(model, cache, ids[:, i : i + 1]) for i in range(begin, steps)]
    return torch.stack(logits)


@pytest.mark.parametrize("rows", [1, 2])
def test_with_full_every_logit_is_that_of_steps_that_run(model, rows):
    prompt = zoo.batch()["input_ids"][:1].repeat(rows, 1)
    want = decode(model, kvloom.Cache(model, "full"), prompt=prompt)
    with recorded(model) as graphs:
        cache = kvloom.Cache(model, "full")
        got = decode(model, cache, prompt=prompt)
    assert graphs.record.records == 3  # 20 tokens, 8 at a time
    assert graphs.record.replays > 10
    assert graphs.checked
    assert not graphs.refused
    assert str(graphs) == (
        "17 steps replayed, 3 run between them; "
        "1 as outside: a call of several tokens, or of embeddings"
    )
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    assert cache.get_seq_length() == prompt.shape[1] + 20
    assert cache.nbytes >= cache.full_nbytes


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cache_ends_with_the_bytes_of_steps_that_run(model, recipe):
    plain = kvloom.Cache(model, recipe)
    decode(model, plain, 30)
    with recorded(model):
        cache = kvloom.Cache(model, recipe)
        decode(model, cache, 30)
    for a, b in zip(plain.compressed, cache.compressed, strict=True):
        x, y = a.cache._state.segment, b.cache._state.segment
        assert len(x) == len(y)
        assert x.keys.packed_count == y.keys.packed_count
        assert x.values.packed_count == y.values.packed_count


def test_generate_gives_the_tokens_of_the_plain_model(model):
    prompt = zoo.batch(rows=2, padding=(0, 0))
    want = model.generate(**prompt, **GREEDY)
    with recorded(model) as graphs, kvloom.attach(model, "full"):
        got = model.generate(**prompt, **GREEDY)
    assert torch.equal(got, want)
    assert graphs.record.records == 3


@pytest.mark.parametrize("recipe", ["full", "snapkv"])
def test_a_padded_batch_is_as_its_rows(model, recipe):
    padded = zoo.batch(rows=2, padding=(0, 17))
    with recorded(model) as graphs, torch.no_grad():
        caches = kvloom.Cache(model, recipe), kvloom.Cache(model, recipe)
        logits = []
        for cache, padding in zip(caches, (0, 17), strict=True):
            rows = slice(0, 2) if not padding else slice(1, 2)
            ids, mask = (padded[name][rows, padding:] for name in ("input_ids", "attention_mask"))
            position = (mask.cumsum(dim=-1) - 1).clamp(min=0)
            out = model(ids, attention_mask=mask, position_ids=position, past_key_values=cache)
            found = [out.logits[-1:, -1]]
            for i in range(20):
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                position = mask.cumsum(dim=-1)[:, -1:] - 1
                ids = padded["input_ids"][rows, 30 + i : 31 + i]
                out = model(
                    ids, attention_mask=mask, position_ids=position, past_key_values=cache
                )  # fmt: skip
                found.append(out.logits[-1:, -1])
            logits.append(torch.stack(found))
    assert graphs.record.records >= 5
    torch.testing.assert_close(*logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("padding", "hidden"), [(0, 3), (0, -3), (2, 3), (2, -3)])
def test_another_mask_ends_recorded_steps(model, padding, hidden):
    ids, want = zoo.batch()["input_ids"][:1], []
    masks = torch.ones(4, 1, ids.shape[1] + 4, dtype=torch.long)
    masks[:, :, :padding] = 0
    masks[2:, :, hidden] = 0  # from the third step on, a token is hidden, or one that waits

    def run():
        cache = kvloom.Cache(model, "full")
        read(model, cache, ids, attention_mask=masks[0, :, : ids.shape[1]])
        return [
            read(model, cache, ids[:, i : i + 1],
                 attention_mask=masks[i, :, : ids.shape[1] + 1 + i])
            for i in range(4)
        ]  # fmt: skip

    with torch.no_grad():
        want = run()
        with recorded(model):
            got = run()
    torch.testing.assert_close(torch.cat(got), torch.cat(want), atol=TOLERANCE, rtol=0)


LOOKUP = {"prompt_lookup_num_tokens": 3, "eos_token_id": 1}  # transformers 5.10 needs the latter


@pytest.mark.parametrize("options", [{"num_beams": 2}, LOOKUP])
def test_beams_and_drafts_give_the_tokens_of_the_plain_model(model, options):
    prompt = zoo.batch(rows=1, padding=(0,))
    want = model.generate(**prompt, **GREEDY, **options)
    with recorded(model) as graphs, kvloom.attach(model, "full"):
        got = model.generate(**prompt, **GREEDY, **options)
    assert torch.equal(got, want)
    assert graphs.run <= 1  # before the first reordering
    assert not graphs.replayed


@pytest.mark.parametrize(
    "recipe", ["streaming", "h2o", "quest:page=16,tokens=96", "small:block=64"]
)
def test_a_recipe_that_changes_what_a_step_reads_runs_as_without_graphs(model, recipe):
    want = decode(model, kvloom.Cache(model, recipe))
    with recorded(model) as graphs:
        got = decode(model, kvloom.Cache(model, recipe))
    assert torch.equal(got, want)
    assert not graphs.record.records
    assert any(f"recipe {recipe!r}" in why for why in graphs.others)


READERS = {
    "nbytes": lambda cache, path: cache.nbytes,
    "bits": lambda cache, path: cache.bits_per_value,
    "layers": lambda cache, path: [layer.get_seq_length() for layer in cache.layers],
    "reorder": lambda cache, path: cache.reorder_cache(torch.zeros(1, dtype=torch.long)),
    "deepcopy": lambda cache, path: copy.deepcopy(cache),
    "pickle": lambda cache, path: pickle.loads(pickle.dumps(cache)),
    "save": lambda cache, path: cache.save(path),
    "repr": lambda cache, path: repr(cache),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_reads_a_cache_finds_the_tokens_that_wait(model, reader, tmp_path):
    file, ids = tmp_path / "cache.safetensors", zoo.batch()["input_ids"][:1]
    want = decode(model, kvloom.Cache(model, "full"), 12)
    with recorded(model), torch.no_grad():
        cache = kvloom.Cache(model, "full")
        decode(model, cache, 5)
        assert cache.steps is not None
        found = READERS[reader](cache, file)
        assert cache.steps is None
        if reader in ("deepcopy", "pickle"):
            cache = found
        elif reader == "save":
            cache = kvloom.Cache.load(model, file)
        assert {layer.get_seq_length() for layer in cache.layers} == {ids.shape[1] + 5}
        got = decode(model, cache, 12, begin=5)
    torch.testing.assert_close(got, want[6:], atol=TOLERANCE, rtol=0)


def test_a_second_turn_reads_the_tokens_that_wait(model):
    turn = zoo.batch(rows=1, tokens=9, padding=(0,))["input_ids"]

    def run(cache):
        decode(model, cache, 5)
        with torch.no_grad():
            return model(turn, past_key_values=cache).logits

    want = run(kvloom.Cache(model, "full"))
    with recorded(model):
        got = run(kvloom.Cache(model, "full"))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_reset_forgets_the_tokens_that_wait(model):
    with recorded(model):
        cache = kvloom.Cache(model, "full")
        first = decode(model, cache, 5)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(decode(model, cache, 5), first)


def test_two_caches_take_turns(model):
    want = decode(model, kvloom.Cache(model, "full"), 6)
    ids = zoo.batch()["input_ids"][:1]
    with recorded(model), torch.no_grad():
        caches = [kvloom.Cache(model, "full") for _ in range(2)]
        for cache in caches:
            read(model, cache, ids)
        for i in range(6):
            for cache in caches:
                got = read(model, cache, ids[:, i : i + 1])
                torch.testing.assert_close(got, want[i + 1], atol=TOLERANCE, rtol=0)
        assert all(cache.steps is not None for cache in caches)
    assert all(cache.steps is None for cache in caches)


def test_a_replay_that_is_wrong_elsewhere_is_found_and_not_used(model):
    want = decode(model, kvloom.Cache(model, "full"))
    with recorded(model, record=frozen) as graphs, pytest.warns(UserWarning, match="differs by"):
        got = decode(model, kvloom.Cache(model, "full"))
    assert "differs by" in graphs.refused
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_a_step_that_cannot_be_recorded_runs(model):
    def fails(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    want = decode(model, kvloom.Cache(model, "full"))
    with recorded(model, record=fails) as graphs, pytest.warns(UserWarning, match="not permitted"):
        got = decode(model, kvloom.Cache(model, "full"))
    assert "LlamaForCausalLM cannot be recorded" in graphs.refused
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("step", [0, 3])
def test_after_an_interrupted_step_the_same_token_can_follow(model, step, monkeypatch):
    want, ids = decode(model, kvloom.Cache(model, "full"), 6), zoo.batch()["input_ids"][:1]
    attend = kvloom.cache.layer.LayerCache.attend_waiting
    calls = []

    def interrupted(self, *args, **options):
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return attend(self, *args, **options)

    with recorded(model), torch.no_grad():
        cache = kvloom.Cache(model, "full")
        decode(model, cache, step)
        monkeypatch.setattr(kvloom.cache.layer.LayerCache, "attend_waiting", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(model, cache, ids[:, step : step + 1])
        monkeypatch.undo()
        assert cache.get_seq_length() == ids.shape[1] + step
        got = decode(model, cache, 6, begin=step)
    torch.testing.assert_close(got, want[step + 1 :], atol=TOLERANCE, rtol=0)


def test_a_failure_to_store_leaves_the_tokens_waiting(model, monkeypatch):
    commit = kvloom.cache.layer.cycle.commit_waiting
    calls = []

    def fails(state, *rest):
        calls.append(state)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        commit(state, *rest)

    with recorded(model):
        cache = kvloom.Cache(model, "near-lossless:residual=32")
        decode(model, cache, 5)
        tokens = cache.get_seq_length()
        monkeypatch.setattr(kvloom.cache.layer.cycle, "commit_waiting", fails)
        with pytest.raises(torch.OutOfMemoryError):
            len(cache.layers)
        monkeypatch.undo()
        assert cache.get_seq_length() == tokens
        assert cache.steps.replay is None  # it would read tensors that packing has replaced
        assert {layer.get_seq_length() for layer in cache.layers} == {tokens}


def test_outside_a_gpu_it_is_refused(model):
    refused = pytest.raises(kvloom.InputError, match="one CUDA device, and this one is on cpu")
    with refused, kvloom.cuda_graphs(model):
        pass


def test_a_block_within_a_block_is_refused(model):
    with recorded(model), pytest.raises(kvloom.CacheMisuse, match="already"), recorded(model):
        pass


def test_a_call_without_positions_runs_as_without_graphs(model):
    ids = zoo.batch()["input_ids"][:1]
    with recorded(model) as graphs, torch.no_grad():
        cache = kvloom.Cache(model, "full")
        for part in (ids, ids[:, :1], ids[:, 1:2], ids[:, 2:3]):
            model(part, past_key_values=cache)
    assert not graphs.record.records
    assert graphs.others["a call without position_ids of one axis"] == 3


def test_a_batch_of_caches_runs_as_without_graphs(model):
    ids = zoo.batch()["input_ids"]
    with recorded(model) as graphs, torch.no_grad():
        caches = [kvloom.Cache(model, "full") for _ in range(2)]
        for i, cache in enumerate(caches):
            read(model, cache, ids[i : i + 1])
        batch = BatchedCaches(model, caches)
        decode(model, caches[0], 2)
        decode(model, caches[1], 2)
        records = graphs.record.records
        assert batch.get_seq_length() == ids.shape[1] + 2
        for i in range(4):
            read(model, batch, ids[:2, i : i + 1])
    assert graphs.record.records == records
    assert [cache.get_seq_length() for cache in caches] == [ids.shape[1] + 6] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_tokens_are_stored_once_although_storing_is_interrupted_at_its_end(
    model, monkeypatch, error
):
    want, calls = decode(model, kvloom.Cache(model, "full"), 12), []
    forget = kvloom.cache.layer.LayerCache.forget_undo

    def interrupted(self):
        calls.append(self)
        if len(calls) == 2 * len(cache.layers) - 1:  # all layers have stored their tokens
            raise error
        forget(self)

    with recorded(model):
        cache = kvloom.Cache(model, "full")
        decode(model, cache, 5)
        monkeypatch.setattr(kvloom.cache.layer.LayerCache, "forget_undo", interrupted)
        with pytest.raises(error):
            cache.store_waiting()
        monkeypatch.undo()
        got = decode(model, cache, 12, begin=5)
    torch.testing.assert_close(got, want[6:], atol=TOLERANCE, rtol=0)


def test_a_refused_reset_or_step_changes_nothing(model):
    want, ids = decode(model, kvloom.Cache(model, "full"), 12), zoo.batch()["input_ids"][:1]
    with recorded(model), torch.no_grad():
        cache = kvloom.Cache(model, "full")
        decode(model, cache, 1)
        with cache.guard.step(), pytest.raises(kvloom.CacheMisuse, match="middle of a step"):
            cache.reset()
        cache.store_waiting()
        thread = Thread(target=lambda: errors.append(error_of(model, cache, ids[:, :1])))
        errors = []
        with cache.guard.step():
            thread.start()
            thread.join()
        assert "middle of a step" in errors[0]
        got = decode(model, cache, 12, begin=1)
    torch.testing.assert_close(got, want[2:], atol=TOLERANCE, rtol=0)


def error_of(model, cache, ids):
    """Return the error of a step."""
    with pytest.raises(kvloom.CacheMisuse) as caught, torch.no_grad():
        read(model, cache, ids)
    return str(caught.value)


def test_replays_of_two_caches_are_each_compared_at_another_token(model):
    want = decode(model, kvloom.Cache(model, "full"), 6)
    with recorded(model, record=frozen) as graphs:
        caches = [kvloom.Cache(model, "full") for _ in range(2)]
        for cache in caches:
            decode(model, cache, 2)
        with pytest.warns(UserWarning, match="differs by"):
            got = decode(model, caches[1], 6, begin=2)
    torch.testing.assert_close(got, want[3:], atol=TOLERANCE, rtol=0)
    assert graphs.refused


def test_large_numbers_that_hide_tokens_do_not_hide_a_wrong_replay(model):
    def hide(module, args, logits):
        return torch.cat([logits, logits.new_full((*logits.shape[:2], 9), -1e9)], dim=-1)

    model.lm_head.register_forward_hook(hide)
    with recorded(model, record=frozen), pytest.warns(UserWarning, match="differs by"):
        decode(model, kvloom.Cache(model, "full"))


def test_a_copy_in_a_recorded_step_is_refused(model):
    def copy_cache(*_):
        with pytest.raises(kvloom.CacheMisuse, match="in a recorded step"):
            copy.deepcopy(cache)
        copied.append(True)

    copied = []
    with recorded(model):
        cache = kvloom.Cache(model, "full")
        decode(model, cache, 3)
        hook = model.model.layers[0].register_forward_pre_hook(copy_cache)
        decode(model, cache, 4, begin=3)
        hook.remove()
    assert copied


@pytest.mark.parametrize("wrong", [torch.nan, 1e3])
def test_a_replay_that_is_wrong_from_the_first_is_not_used(model, wrong):
    def record(run):
        out = run()
        return (lambda: out.logits.add_(wrong)), out

    want = decode(model, kvloom.Cache(model, "full"))
    with recorded(model, record=record), pytest.warns(UserWarning, match="differs by"):
        got = decode(model, kvloom.Cache(model, "full"))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_a_cache_is_freed_with_its_last_reference(model):
    with recorded(model):
        cache = kvloom.Cache(model, "full")
        decode(model, cache, 5)
        reference = weakref.ref(cache)
        gc.collect()
        gc.disable()
        try:
            del cache
            assert reference() is None
        finally:
            gc.enable()


def test_the_block_ends_for_all_caches_although_one_cannot_store_its_tokens(model, monkeypatch):
    commit = kvloom.cache.layer.cycle.commit_waiting

    def fails(state, *rest):
        if state is first:
            raise torch.OutOfMemoryError("no memory")
        commit(state, *rest)

    caches = [kvloom.Cache(model, "full") for _ in range(2)]
    first = caches[0].compressed[0].cache._state
    block = recorded(model)
    block.__enter__()
    for cache in caches:
        decode(model, cache, 3)
    monkeypatch.setattr(kvloom.cache.layer.cycle, "commit_waiting", fails)
    with pytest.raises(torch.OutOfMemoryError):
        block.__exit__(None, None, None)
    assert [cache.steps is None for cache in caches] == [False, True]
    monkeypatch.undo()
    assert len({layer.get_seq_length() for cache in caches for layer in cache.layers}) == 1


def test_the_tokens_that_the_last_step_read_are_counted(model):
    plain = kvloom.Cache(model, "near-lossless:residual=32")
    decode(model, plain, 5)
    with recorded(model):
        cache = kvloom.Cache(model, "near-lossless:residual=32")
        decode(model, cache, 5)
        assert cache.tokens_read == plain.tokens_read
