"""A damaged file of a saved cache is refused."""

from __future__ import annotations

import random

import pytest
import torch
import zoo

import kvloom
from backends import by_reference
from kvloom.errors import SavedCacheError
from kvloom.store import files
from mutations import flipped

pytestmark = by_reference  # none of this depends on kernels

KIVI = "kivi:group=16,residual=32"
RECIPES = [
    KIVI,
    "full",
    "h2o",
    "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1",
    "clusterkv:tokens=40,size=8,sinks=4,full_layers=1,tier=host",
]
BATCH = zoo.batch(2, 80, (0, 17))


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama-gqa", head_dim=32)


def step(model, cache, lo: int, hi: int) -> torch.Tensor:
    """Logits of tokens lo to hi."""
    ids, mask = BATCH["input_ids"][:, lo:hi], BATCH["attention_mask"][:, :hi]
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits


def save(model, recipe: str, path) -> kvloom.Cache:
    cache = kvloom.Cache(model, recipe)
    step(model, cache, 0, 70)
    cache.save(path)
    return cache


def flips(whole: bytes, count: int) -> list[bytes]:
    """Return copies with one bit flipped: count in the header, count in the body, the last 32."""
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0).randrange
    bits = [draw(8 * header) for _ in range(count)]
    bits += [draw(8 * header, 8 * len(whole)) for _ in range(count)]
    bits += range(8 * len(whole) - 32, 8 * len(whole))  # the checksum itself
    return [flipped(whole, bit) for bit in bits]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_flipped_bit_is_refused(model, recipe, tmp_path):
    path = tmp_path / "prefix.kv"
    save(model, recipe, path)
    for changed in flips(path.read_bytes(), 150):
        path.write_bytes(changed)
        with pytest.raises(SavedCacheError, match=r"prefix\.kv' ") as error:
            kvloom.Cache.load(model, path)
        assert "\n" not in str(error.value)


def test_a_file_cut_off_or_appended_to_is_refused(model, tmp_path):
    path = tmp_path / "prefix.kv"
    save(model, KIVI, path)
    whole = path.read_bytes()
    cuts = [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 4, len(whole) - 1]
    tails = [b"\0", b"\n", bytes(4), whole[-4:], whole]
    for changed in [whole[:cut] for cut in cuts] + [whole + tail for tail in tails]:
        path.write_bytes(changed)
        with pytest.raises(SavedCacheError, match=r"prefix\.kv' is damaged"):
            kvloom.Cache.load(model, path)
    path.write_bytes(whole)
    kvloom.Cache.load(model, path)


def test_metadata_tensor_names_and_shapes_are_part_of_the_checksum(model, tmp_path):
    path = tmp_path / "prefix.kv"
    save(model, KIVI, path)
    whole = path.read_bytes()
    for old, new in [
        (b'\\"seen\\": 70', b'\\"seen\\": 71'),
        (b'"0.0.storage.keys.tail.live"', b'"3.0.storage.keys.tail.live"'),
        (b'"shape":[2,2,', b'"shape":[1,4,'),
        (b'"F32"', b'"I32"'),
    ]:
        assert old in whole
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(SavedCacheError, match="is damaged: its checksum is wrong"):
            kvloom.Cache.load(model, path)


def test_a_file_that_cannot_be_read_is_refused(model, tmp_path, monkeypatch):
    path = tmp_path / "prefix.kv"
    save(model, KIVI, path)

    def broken(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "intact", broken)
    with pytest.raises(SavedCacheError, match=r"prefix\.kv' cannot be read: Input/output error; "):
        kvloom.Cache.load(model, path)
