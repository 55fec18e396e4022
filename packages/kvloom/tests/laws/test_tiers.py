"""Tiers: the same answers, what is copied is what was not there, and files that fail say so."""

from __future__ import annotations

import copy
import errno
import os
from dataclasses import replace

import pytest
import torch

import probe
from backends import by_reference
from kvloom.cache.layer import LayerCache
from kvloom.errors import CacheMisuse, RecipeError, TierError
from kvloom.recall import Recall, Tier, TopK
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import resolve
from limits import limited
from steps import draw, feed

PROMPT, STEPS = 120, 40
B, HQ, HK, D = 2, 4, 2, 32
PACKED = pytest.param("packed", marks=pytest.mark.rare)


def recipe(index: str = "clusters", tier: Tier | None = None, group: str = "mean") -> Recipe:
    """A small one; "packed" is clusters over keys per channel and values per token."""
    found = resolve("quest:page=8" if index == "pages" else "clusterkv:size=8").recall.index
    if index != "pages":
        found = replace(found, block=16 if index == "packed" else 20, block_clusters=3)
    store = resolve("kivi:group=16,residual=16" if index == "packed" else "full").store
    recall = Recall(found, 40, group, full_layers=0, tier=tier)
    return Recipe(
        store=store, recall=recall, protect=Protect(sinks=4, exact_recent=2), name="small"
    )


def layer(made: Recipe):
    return LayerCache(made, "layer 0", 0, 1)


def tokens(seed: int, n: int = PROMPT + STEPS):
    """Queries that move slowly, so that steps ask for some of what the last one did."""
    q, k, v = draw(seed, n, batch=B, hq=HQ, hk=HK)
    return q.cumsum(dim=2) / torch.arange(1, n + 1).sqrt()[:, None] * 2, k, v


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("index", ["clusters", "pages", PACKED])
@pytest.mark.parametrize("group", ["mean", "each"])
def test_a_tier_changes_no_answer_and_copies_what_did_not_lie_ready(kind, steps, index, group):
    cache, plain = (
        layer(recipe(index, Tier(kind, steps=steps), group)),
        layer(recipe(index, None, group)),
    )
    qkv = tokens(0)
    for c in (cache, plain):
        feed(c, *(x[:, :, :PROMPT] for x in qkv))
    assert probe.tier(cache).traffic == (0, 0, 0)
    cache.observe()
    ready: list = []  # of every step before: for each row and head, the slots it read
    hits = misses = 0
    for t in range(PROMPT, PROMPT + STEPS):
        step = [x[:, :, t : t + 1] for x in qkv]
        got, want = feed(cache, *step), feed(plain, *step)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
        read = [set(row) for row in probe.recalled(cache).flatten(0, 1).tolist()]
        for i, slots in enumerate(read):
            near = set().union(*(before[i] for before in ready[max(0, len(ready) - steps) :]))
            hits, misses = hits + len(slots & near), misses + len(slots - near)
        ready.append(read)
        assert probe.tier(cache).traffic == (hits, misses, misses * 2 * D * 4)
    assert (hits > misses / 4) == (steps > 0)
    assert misses > 0


def test_what_lies_on_the_device_does_not_grow_with_the_context():
    sizes = {}
    for n in (100, 200, 400):
        cache = layer(recipe("pages", Tier("host", steps=2)))
        feed(cache, *tokens(0, n + 1), [n, 1])
        sizes[n] = probe.tier(cache).resident.nbytes + sum(
            x.nbytes for x in probe.tier(cache).read_slots
        )
        assert probe.tokens(cache).nbytes < 30 * 2 * B * HK * D * 4
        assert cache.nbytes >= probe.tier(cache).nbytes > 2 * B * HK * D * 4 * (n - 20)
    assert len(set(sizes.values())) == 1


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("index", ["clusters", PACKED])
def test_a_copy_of_a_cache_goes_its_own_way(kind, index):
    cache = layer(recipe(index, Tier(kind)))
    feed(cache, *tokens(0), [PROMPT, *[1] * STEPS])
    twin = copy.deepcopy(cache)
    feed(cache, *tokens(1, 60), [1] * 60)
    want = layer(recipe(index))
    feed(want, *tokens(0), [PROMPT, *[1] * STEPS])
    outputs = [feed(c, *tokens(2, 60), [1] * 60) for c in (twin, want)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


def shared(batch: int, n: int, seed: int):
    """Tokens of a batch, the rows alike but for a little."""
    return draw(seed, n, batch=batch, hq=HQ, hk=HK)


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("index", ["clusters", PACKED])
def test_reordered_beams_copy_no_rows_of_a_tier(kind, index):
    """Reordered, grown, extended, shrunk: the answers of a plain cache, and who copies what."""
    cache, plain = layer(recipe(index, Tier(kind))), layer(recipe(index))
    moves = [
        (4, lambda x: x.repeat_interleave(2, dim=0)),
        (4, lambda x: x.index_select(0, torch.tensor([3, 0, 0, 2]))),
        (4, lambda x: x.index_select(0, torch.tensor([1, 1, 2, 0]))),
        (1, lambda x: x[torch.tensor([2])]),
        (3, lambda x: x.repeat_interleave(3, dim=0)),
    ]
    batch = 2
    for c in (cache, plain):
        feed(c, *shared(batch, PROMPT, 0))
    for seed, (rows, move) in enumerate(moves):
        held = [
            x.data_ptr()
            for shelf in probe.tier(cache).buffers
            for r in shelf.rows
            for x in [r.data]
        ]
        hits = probe.tier(cache).traffic.hits
        for c in (cache, plain):
            c.map(move)
        now = [
            x.data_ptr()
            for shelf in probe.tier(cache).buffers
            for r in shelf.rows
            for x in [r.data]
        ]
        assert (held == now) == (rows >= batch)
        batch = rows
        new = shared(batch, 45, seed + 1)
        outputs = [feed(c, *new, [1] * 45) for c in (cache, plain)]
        torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
        assert probe.tier(cache).traffic.hits > hits
        assert probe.tier(cache).tokens > PROMPT - 40
    many = [layer(recipe(index, Tier(kind))) for _ in range(2)]
    for c, n in zip(many, (8, 1), strict=True):
        feed(c, *shared(n, PROMPT, 0))
    assert probe.tier(many[0]).nbytes == 8 * probe.tier(many[1]).nbytes
    many[0].map(lambda x: x[:1])
    assert (
        probe.tier(many[0]).nbytes <= probe.tier(many[1]).nbytes
    )  # rows outside the batch are released


# --- files ---------------------------------------------------------------------------------------


def test_a_file_goes_with_its_cache(tmp_path):
    cache = layer(recipe("clusters", Tier("file", str(tmp_path))))
    feed(cache, *tokens(0))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size > 0
    cache.reset()
    assert not file.exists()
    del cache
    assert list(tmp_path.iterdir()) == []


@by_reference
def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(TierError, match=r"no file for the cache can be made in .*nowhere.*exists"):
        layer(recipe("clusters", Tier("file", str(tmp_path / "nowhere"))))


@by_reference
def test_what_is_no_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=r"file' \(Not a directory\); give a folder that exists"):
        layer(recipe("clusters", Tier("file", str(tmp_path / "file"))))


@pytest.mark.parametrize(("harm", "says"), [("unlink", "vanished"), ("cut", "been cut off")])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("index", ["clusters", PACKED])
def test_a_file_that_is_lost_ends_the_cache_and_not_the_process(tmp_path, harm, says, size, index):
    cache = layer(recipe(index, Tier("file", str(tmp_path))))
    feed(cache, *tokens(0))
    files = sorted(tmp_path.iterdir())
    assert len(files) == {"clusters": 1, "packed": 6}[index]  # codes, scales, zeros of both
    if harm == "unlink":
        files[-1].unlink()
    else:
        os.truncate(files[-1], 100)
    with pytest.raises(TierError, match=f"has {says}, so its tokens are lost"):
        feed(cache, *tokens(1, size))
    with pytest.raises(CacheMisuse, match=f"cannot be used any more: .*{says}"):
        feed(cache, *tokens(1, size))
    cache.reset()
    feed(cache, *tokens(1, 20))


@by_reference
def test_a_full_disk_is_named(tmp_path, monkeypatch):
    cache = layer(recipe("clusters", Tier("file", str(tmp_path))))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierError, match=r"cannot grow to 116,736 bytes \(No space left"):
        feed(cache, *tokens(0, PROMPT))
    with pytest.raises(CacheMisuse, match=r"cannot be used any more: .*No space left"):
        feed(cache, *tokens(0, 1))


def test_a_disk_that_is_full_later_ends_the_cache_and_not_the_process(tmp_path):
    """The kernel itself refuses: a limit on the size of this process's files."""
    cache = layer(recipe("clusters", Tier("file", str(tmp_path))))
    feed(cache, *tokens(0))
    (file,) = tmp_path.iterdir()
    too_large = r"cannot grow to .* bytes \(File too large\); make"
    with limited("FSIZE", file.stat().st_size), pytest.raises(TierError, match=too_large):
        feed(cache, *tokens(1, 100), [1] * 100)
    with pytest.raises(CacheMisuse, match=r"cannot be used any more: .*File too large"):
        feed(cache, *tokens(0, 1))
    cache.reset()
    feed(cache, *tokens(1, 20))


@by_reference
@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Tier("cloud"), "tier kind='cloud' is not one of host, file"),
        (lambda: Tier("host", "/tmp"), "folder='/tmp' needs kind=\"file\", not 'host'"),
        (lambda: Tier("host", steps=-1), "steps=-1 must be a whole number, 0 or more"),
        (lambda: Recall(TopK(), tier=Tier()), "index='topk' reads every key"),
        (
            lambda: replace(resolve("clusterkv:tier=host"), store=resolve("skvq").store),
            "keys: a tier takes tokens that are packed after RoPE, each head by itself",
        ),
        (
            lambda: replace(resolve("clusterkv:tier=host"), store=resolve("turbo").store),
            "keys: a tier takes tokens that are packed after RoPE, each head by itself, and not "
            "rotated; use kivi or rtn without rotate, or leave out the tier",
        ),
        (
            lambda: replace(recipe("clusters", Tier()), store=resolve("kivi").store),
            "the index takes 20 tokens at a time and the tier 32 packed ones: "
            "neither is a multiple of the other; let the index take 32 or 64 at a time",
        ),
    ],
)
def test_a_tier_that_cannot_be_is_refused(build, says):
    with pytest.raises(RecipeError) as refused:
        build()
    assert says in str(refused.value)
