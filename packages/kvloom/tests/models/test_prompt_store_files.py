"""A prompt store never uses another prompt's entry, nor a damaged, renamed or half-written one."""

from __future__ import annotations

import copy
import errno
import io
import os
import random
import shutil
import sqlite3
import subprocess
import time
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
import zoo
from test_prompt_store import PACKED, answer, equal, prompt
from test_saved_refused import rewrite

import kvloom
from backends import by_reference
from kvloom.errors import SavedCacheError, StoreError
from kvloom.hf.prompts.folder import INDEX
from kvloom.hf.prompts.identity import BLOCK, chain, combined, fields, seed
from kvloom.store import files
from mutations import flipped

pytestmark = by_reference  # none of this depends on kernels

IDS = prompt(300)


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama-gqa")


@pytest.fixture
def store(model, tmp_path):
    """A store with an entry of 256 tokens of `IDS`."""
    store = kvloom.PromptStore(tmp_path / "store")
    put(model, store, IDS, 256)
    return store


def put(model, store, ids, tokens):
    """Store the first tokens of a prompt; return their cache."""
    cache = kvloom.Cache(model, PACKED)
    with torch.no_grad():
        model(ids[:, :tokens], past_key_values=cache)
    store.put(cache, ids[:, :tokens])
    return cache


def held(model, store, ids=IDS, recipe=PACKED) -> int:
    return store.longest(model, recipe, ids)[1]


def with_flip(x: bytes, draw: random.Random) -> bytes:
    """Return bytes of which one bit is another."""
    return flipped(x, draw.randrange(8 * len(x)))


def test_one_bit_of_one_field_is_another_prompt(model, store):
    """100,000 look-ups: none finds more than the blocks before the bit."""
    cache, draw = kvloom.Cache(model, PACKED), random.Random(0)
    parts = fields(cache, "")
    assert held(model, store) == 256
    names = [name for name, value in parts.items() if value]
    assert len(names) == 9  # all but the tenant, which is empty
    for number in range(90_000):
        name = names[number % len(names)]
        seed = combined({**parts, name: with_flip(parts[name], draw)})
        assert store.index.longest(chain(seed, IDS)) == 0
    seed = combined(parts)
    for tokens in (64, 128, 192):
        put(model, store, IDS, tokens)
    for _ in range(10_000):
        place = draw.randrange(256)
        ids = IDS.clone()
        ids[0, place] ^= 1 << draw.randrange(7)
        assert store.index.longest(chain(seed, ids)) == place // BLOCK


def test_fields_do_not_run_into_each_other():
    assert combined({"a": b"bc", "d": b""}) != combined({"a": b"b", "cd": b""})
    ids = torch.arange(128)
    assert chain(b"s", ids)[0] == chain(b"s", ids[:64])[0] != chain(b"s", ids[64:])[0]
    assert chain(b"s", ids) == chain(b"s", ids.to(torch.int32)) != chain(b"t", ids)
    assert chain(b"s", ids[:63]) == []


def test_what_changes_the_model_changes_the_key(store):
    model = zoo.build("llama-gqa")  # equal weights in another object
    assert held(model, store) == 256
    weight = model.model.layers[1].mlp.up_proj.weight
    attention = model.model.layers[0].self_attn

    def changed(change, undo) -> bool:
        change()
        missed = held(model, store) == 0
        undo()
        return missed and held(model, store) == 256

    def flip_a_bit():
        with torch.no_grad():
            weight.view(torch.int32)[3, 5] ^= 1

    def add(x):
        weight.data += x

    def activate(names):
        attention.active_adapters, attention.scaling_of = names, {"a": 0.5}

    assert changed(flip_a_bit, flip_a_bit)
    before = weight.data.clone()
    assert changed(lambda: add(0.01), lambda: weight.data.copy_(before))  # as peft merges weights
    assert changed(lambda: activate(["a"]), lambda: [vars(attention).pop(x) for x in ADAPTER])
    for obj, name, value in (
        (model.config, "rope_parameters", {"rope_theta": 1e5, "rope_type": "default"}),
        (model.config, "rms_norm_eps", 1e-5),
        (attention, "scaling", 0.3),
        (model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 2),
    ):
        former = getattr(obj, name, None)
        undo = partial(setattr, obj, name, former)
        if former is None:
            undo = partial(delattr, obj, name)
        assert changed(partial(setattr, obj, name, value), undo), name
    assert held(model, kvloom.PromptStore(store.folder, tenant="other")) == 0
    assert held(model, store, recipe="near-lossless:group=16,residual=64") == 0
    assert held(copy.deepcopy(model).bfloat16(), store) == 0
    for problem, change in (
        ("training mode", model.train), ("meta device", lambda: model.eval().to("meta")),
    ):  # fmt: skip
        change()
        with pytest.raises(StoreError, match=problem):
            seed(kvloom.Cache(model, PACKED), "")


ADAPTER = "active_adapters", "scaling_of"


def test_a_renamed_file_is_never_used(model, store):
    other = prompt(300, seed=1)
    put(model, store, other, 256)
    first, second = (store.index.path(entry.key) for entry in store.entries())
    os.replace(first, second)
    for ids in (IDS, other):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert held(model, store, ids) == 0
        assert len(caught) == (ids is (IDS if second.stem == key_of(model, IDS) else other))
    assert store.entries() == []
    assert [path.name for path in store.folder.glob("*.damaged")] == [f"{second.stem}.damaged"]
    put(model, store, IDS, 256)
    path = store.index.path(key_of(model, IDS))
    os.replace(path, path.with_name(f"{'0' * 64}.safetensors"))
    with pytest.warns(UserWarning, match="not the entry of this name"):
        assert kvloom.PromptStore(store.folder).entries() == []


def key_of(model, ids) -> str:
    first = seed(kvloom.Cache(model, PACKED), "")
    return chain(first, ids[:, :256])[-1].hex()


def test_a_damaged_file_is_set_aside_and_the_prompt_is_read_again(model, store):
    path, draw = store.index.path(store.entries()[0].key), random.Random(0)
    whole = path.read_bytes()
    with kvloom.attach(model, PACKED, store=store):
        expected = answer(model, IDS)
        for damage in (*(with_flip for _ in range(20)), lambda x, _: x[:-9], lambda *_: b""):
            path.write_bytes(damage(whole, draw))
            with pytest.warns(UserWarning, match="set aside"):
                assert equal(answer(model, IDS), expected)
            assert path.read_bytes() == whole  # read again, and stored again
    for problem, changes in {
        "not the|is the entry": {"prompt": "0" * 64},
        "damaged": {"layers": []},
        "format": {"format": 0},
    }.items():
        path.write_bytes(whole)
        rewrite(path, **changes)
        with pytest.warns(UserWarning, match=problem):
            assert held(model, store) == 0
        assert store.entries() == []
        put(model, store, IDS, 256)
    assert len(list(store.folder.glob("*.damaged"))) == 1


def test_token_ids_are_compared(model, store, monkeypatch):
    other = IDS.clone()
    other[0, 7] += 1
    for name in ("longest", "last_seen"):
        monkeypatch.setattr(store.index, name, lambda chain: len(chain))
    key = store.entries()[0].key
    monkeypatch.setattr("kvloom.hf.prompts.store.chain", lambda *_: [bytes.fromhex(key)] * 4)
    assert held(model, store) == 256
    monkeypatch.setattr(store.index, "longest", lambda chain: 4 * (len(chain) == 4))
    with pytest.warns(UserWarning, match="token ids are others"):
        assert held(model, store, other) == 0


class Faulty(io.FileIO):
    """A file that writes at most 999 bytes at a time, and fails after some of them."""

    room, error = 1 << 40, errno.ENOSPC

    def write(self, data):
        if Faulty.room <= 0:
            raise OSError(Faulty.error, os.strerror(Faulty.error))
        Faulty.room -= 999
        return super().write(bytes(data[:999]))


@pytest.fixture
def faulty(monkeypatch):
    create = files._create

    def replaced(path):
        file = create(path)
        file.close()
        return io.BufferedWriter(Faulty(file.name, "wb"))

    monkeypatch.setattr(files, "_create", replaced)
    monkeypatch.setattr(Faulty, "room", 1 << 40)


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failed_put_is_never_visible(model, store, error, monkeypatch):
    monkeypatch.setattr(Faulty, "error", error)
    before, other = sorted(os.listdir(store.folder)), prompt(300, seed=2)
    for room in (0, 1, 5_000, 50_000):
        monkeypatch.setattr(Faulty, "room", room)
        with pytest.raises(StoreError, match=os.strerror(error)):
            put(model, store, other, 256)
    monkeypatch.setattr(Faulty, "room", 1 << 40)
    for part, failure, reason in (
        ("kvloom.store.files.os.fsync", lambda _: fail(error), "cannot be written"),
        ("kvloom.hf.prompts.folder._insert", lambda *_: fail_in_database(), "cannot be used"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, failure)
            with pytest.raises(StoreError, match=reason):
                put(model, store, other, 256)
    assert sorted(os.listdir(store.folder)) == before
    monkeypatch.setattr(Faulty, "room", 0)
    with kvloom.attach(model, PACKED, store=store), pytest.warns(UserWarning, match="be written"):
        failed = answer(model, other)
    assert held(model, store, other) == 0
    monkeypatch.setattr(Faulty, "room", 1 << 40)  # short writes alone are no failure
    with kvloom.attach(model, PACKED, store=store):
        assert equal(answer(model, other), failed)
    assert held(model, store, other) == 256
    assert store.verify() == {}


def fail(error):
    raise OSError(error, os.strerror(error))


def fail_in_database():
    raise sqlite3.OperationalError("database or disk is full")


def test_a_store_that_cannot_be_written_to_is_still_read(model, store, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(files, "_create", lambda _: fail(errno.EROFS))
    read_only = kvloom.PromptStore(store.folder)
    assert held(model, read_only) == 256
    with pytest.raises(StoreError, match="Read-only"):
        put(model, read_only, prompt(300, seed=3), 64)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="cannot be a prompt store"):
        kvloom.PromptStore(store.index.path(store.entries()[0].key))


def sizes(entry):
    return entry.key, entry.tokens, entry.nbytes


DAMAGE = {"removed": None, "garbage": b"garbage" * 999, "empty": b"", "one byte": b"S"}


@pytest.mark.parametrize("while_open", [True, False])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_the_index_is_made_again_from_the_files(model, store, damage, while_open):
    before = store.entries()
    if not while_open:
        store.index._db.close()
    for path in store.folder.glob(f"{INDEX}*"):
        path.unlink()
    if damage is not None:
        (store.folder / INDEX).write_bytes(damage)
    stores = (store, kvloom.PromptStore(store.folder))[not while_open :]
    for used in stores:
        assert list(map(sizes, used.entries())) == list(map(sizes, before))
        assert held(model, used) == 256
    for used in stores:
        put(model, used, prompt(300, seed=4), 64)
    assert held(model, kvloom.PromptStore(store.folder), prompt(300, seed=4)) == 64


def test_a_folder_that_was_deleted_is_an_empty_store(model, store):
    shutil.rmtree(store.folder)
    assert held(model, store) == 0
    put(model, store, IDS, 256)
    assert held(model, store) == 256


def test_a_file_in_place_of_the_folder_costs_no_answer(model, store):
    shutil.rmtree(store.folder)
    store.folder.touch()
    with pytest.raises(StoreError, match="cannot be a prompt store: File exists"):
        store.entries()
    with (
        kvloom.attach(model, PACKED, store=store),
        pytest.warns(UserWarning, match="cannot be a prompt store"),
    ):
        answer(model, IDS)


def test_a_folder_in_place_of_an_entry_is_set_aside(model, store):
    path = store.index.path(store.entries()[0].key)
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="is a folder"):
        assert held(model, store) == 0
    put(model, store, IDS, 256)
    assert held(model, store) == 256


@pytest.mark.parametrize("method", ["longest", "touch", "last_seen", "note"])
def test_an_index_that_fails_costs_no_answer(model, store, method, monkeypatch):
    with kvloom.attach(model, PACKED):
        expected = answer(model, IDS)
    monkeypatch.setattr(
        store.index, method, lambda *_: store.index._run(lambda _: fail_in_database())
    )
    with (
        kvloom.attach(model, PACKED, store=store),
        pytest.warns(UserWarning, match="database or disk is full"),
    ):
        assert equal(answer(model, IDS), expected)
    assert store.report().bypassed == 1


def refuse(cause, *_):
    raise SavedCacheError("not read now") from cause


@pytest.mark.parametrize("lack", [OSError(errno.EMFILE, "no descriptors"), MemoryError()])
def test_a_file_that_cannot_be_read_now_stays(model, store, lack, monkeypatch):
    def fill(*_):
        raise lack

    with monkeypatch.context() as patch:
        patch.setattr("kvloom.hf.save.fill", fill)
        with pytest.warns(UserWarning, match=type(lack).__name__):
            assert held(model, store) == 0
    assert held(model, store) == 256
    with monkeypatch.context() as patch:
        patch.setattr("kvloom.hf.save.prompt_ids", fill)
        for name in (INDEX, f"{INDEX}-wal", f"{INDEX}-shm"):
            (store.folder / name).unlink(missing_ok=True)
        assert kvloom.PromptStore(store.folder).entries() == []
    again = kvloom.PromptStore(store.folder)
    with monkeypatch.context() as patch:
        patch.setattr("kvloom.hf.prompts.store.read_entry", partial(refuse, lack))
        with pytest.warns(UserWarning, match="not read now"):
            assert list(again.verify().values()) == ["not read now"]
    assert held(model, again) == 256


def test_an_entry_that_another_process_removes_meanwhile_is_a_miss(model, store, monkeypatch):
    path = store.index.path(store.entries()[0].key)
    monkeypatch.setattr(os.path, "isfile", lambda _: path.unlink() is None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert held(model, store) == 0
    monkeypatch.undo()
    assert store.entries() == []


def test_the_log_of_the_index_stays_small(store):
    for number in range(300):
        store.index.note([number.to_bytes(32, "little")] * 9, max_bytes=1 << 30)
    assert store.report().nbytes - store.entries()[0].nbytes < 1 << 20


def test_an_index_damaged_while_another_has_it_open_is_made_again_at_once(model, store):
    (store.folder / INDEX).write_bytes(b"S")
    began = time.monotonic()
    assert held(model, kvloom.PromptStore(store.folder)) == 256
    assert time.monotonic() - began < 30  # SQLite would wait for 60 s


@pytest.mark.parametrize(
    "change",
    ["key = x'00'", "used = NULL", "used = 1e300", "tokens = -1", "nbytes = 'x'", "model = 1",
     "recipe = CAST(x'ff' AS TEXT)"],
)  # fmt: skip
def test_a_damaged_row_makes_the_index_again(model, store, change):
    before = store.entries()
    store.index._run(lambda db: db.execute(f"UPDATE entries SET {change}"))
    assert list(map(sizes, kvloom.PromptStore(store.folder).entries())) == list(map(sizes, before))
    assert held(model, kvloom.PromptStore(store.folder)) == 256


def test_damaged_names_of_tables_make_the_index_again(model, store):
    before, path = store.entries(), store.folder / INDEX
    store.index._run(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
    store.index._db.close()
    whole = path.read_bytes()
    assert b"tableseenseen" in whole
    path.write_bytes(whole.replace(b"tableseenseen", b"table\xffeenseen"))
    assert list(map(sizes, kvloom.PromptStore(store.folder).entries())) == list(map(sizes, before))


def test_a_whole_file_without_a_row_gets_one(model, store):
    key = store.entries()[0].key
    store.index._run(lambda db: db.execute("DELETE FROM entries"))
    assert held(model, store) == 0
    put(model, store, IDS, 256)
    assert held(model, store) == 256
    assert [entry.key for entry in store.entries()] == [key]


def test_files_and_rows_are_reconciled(model, store):
    entry = store.entries()[0]
    abandoned = store.folder / f".{entry.key}.safetensors.{'0' * 32}"
    abandoned.write_bytes(b"half")
    store.index.path(entry.key).unlink()
    assert held(model, store) == 0  # a missing file is a miss
    put(model, store, IDS, 128)
    store.index.path(store.entries()[0].key).unlink()
    assert kvloom.PromptStore(store.folder).entries() == []
    assert not abandoned.exists()


def test_the_longest_unused_and_the_oldest_go_first(model, tmp_path):
    store = kvloom.PromptStore(tmp_path)
    prompts = [prompt(300, seed) for seed in range(4)]
    for ids in prompts[:3]:
        put(model, store, ids, 256)
    size = store.entries()[0].nbytes
    assert held(model, store, prompts[0]) == 256  # now the last used
    limit = 3 * size + store.index.database_nbytes + size // 2
    small = kvloom.PromptStore(tmp_path, max_bytes=limit)
    put(model, small, prompts[3], 256)
    assert [held(model, small, ids) for ids in prompts] == [256, 0, 256, 256]
    assert small.report().nbytes <= limit
    used = subprocess.run(["du", "-sB1", tmp_path], capture_output=True, text=True, check=True)
    folder = tmp_path.stat().st_size  # which du counts, too
    for one in (small, kvloom.PromptStore(tmp_path)):
        assert one.report().nbytes == pytest.approx(int(used.stdout.split()[0]) - folder, rel=0.01)
    time.sleep(0.3)
    assert held(model, small, prompts[0]) == 256
    old = kvloom.PromptStore(tmp_path, max_age=0.25)
    assert len(old.prune()) == 2
    assert [held(model, store, ids) for ids in prompts] == [256, 0, 0, 0]
    with pytest.raises(StoreError, match="does not fit"):
        put(model, kvloom.PromptStore(tmp_path, max_bytes=9_000), prompts[1], 256)


def test_what_is_put_stays(model, tmp_path):
    """Whether the size of a store suffices is known before the others go."""
    store = kvloom.PromptStore(tmp_path)
    for i in range(40):  # the log of the database grows
        put(model, store, prompt(130, i), 128)
    ids = prompt(300, 99)
    put(model, kvloom.PromptStore(tmp_path / "alone"), ids, 256)
    (alone,) = kvloom.PromptStore(tmp_path / "alone").entries()
    kept = 0
    for spare in range(0, 1 << 17, 1 << 13):
        small = kvloom.PromptStore(tmp_path, max_bytes=alone.nbytes + spare)
        with suppress(StoreError):
            put(model, small, ids, 256)
            assert held(model, small, ids) == 256
            assert small.report().nbytes <= small.max_bytes
            kept += 1
    assert kept


def test_seen_boundaries_are_bounded(tmp_path):
    store, draw = kvloom.PromptStore(tmp_path), random.Random(0)
    chains = [[draw.randbytes(32) for _ in range(10)] for _ in range(10)]
    for one in chains:
        store.index.note(one, max_bytes=1_000_000)  # room for 50
    seen = [store.index.last_seen(one) for one in chains]
    assert seen == [0] * 5 + [10] * 5


def test_entries_are_described_and_exported(model, store, tmp_path):
    (entry,) = store.entries()
    assert (entry.tokens, entry.model, entry.recipe) == (256, "LlamaForCausalLM", PACKED)
    assert store.entry(entry.key[:5]) == entry
    about = store.describe(entry.key[:5])
    assert about["ids"] == IDS[0, :256].tolist()
    assert about["recipe"]["name"] == PACKED
    store.export(entry.key, tmp_path / "one.kv")
    cache = kvloom.Cache.load(model, tmp_path / "one.kv")
    assert cache.get_seq_length() == 256
    for key in ("xyz", ""):
        put(model, store, IDS, 64)
        with pytest.raises(StoreError, match="entries have a key"):
            store.entry(key)
    with pytest.raises(StoreError, match="cannot be written"):
        store.export(entry.key, tmp_path / "none" / "one.kv")
