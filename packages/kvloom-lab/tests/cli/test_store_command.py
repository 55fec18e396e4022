"""`kvloom store` lists, checks and removes the entries of a prompt store."""

from __future__ import annotations

import json

import pytest
import torch
from command_line import run

import kvloom
import tiny


@pytest.fixture
def store(tmp_path):
    """A store with entries of 64 and 128 tokens."""
    model, store = tiny.llama(), kvloom.PromptStore(tmp_path / "store")
    ids = torch.arange(128)[None] + 3
    cache = kvloom.Cache(model, "full")
    for begin in (0, 64):
        with torch.no_grad():
            model(ids[:, begin : begin + 64], past_key_values=cache)
        store.put(cache, ids[:, : begin + 64])
    return store


def data(*args) -> dict:
    result = run("store", *args, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_ls_and_show(store):
    listed = data("ls", store.folder)
    assert [entry["tokens"] for entry in listed["entries"]] == [128, 64]
    assert listed["nbytes"] == store.report().nbytes
    entry = listed["entries"][0]
    assert (entry["model"], entry["recipe"]) == ("LlamaForCausalLM", "full")
    table = run("store", "ls", store.folder).output
    assert "2 entries" in table
    assert entry["key"][:16] in table
    shown = data("show", store.folder, entry["key"][:9])
    assert shown["ids"] == list(range(3, 131))
    assert shown["recipe"]["name"] == "full"
    assert "3, 4, 5, 6, 7, 8, 9, 10, …" in run("store", "show", store.folder, entry["key"]).output


def test_verify_prune_and_export(store, tmp_path):
    assert data("verify", store.folder) == {"checked": 2, "damaged": {}}
    last, first = store.entries()
    out = tmp_path / "one.kv"
    exported = run("store", "export", store.folder, last.key[:20], out)
    assert "128 tokens of LlamaForCausalLM under full" in exported.output
    assert kvloom.Cache.load(tiny.llama(), out).get_seq_length() == 128
    limit = store.index.database_nbytes + last.nbytes + first.nbytes // 2
    pruned = data("prune", store.folder, "--max-bytes", f"{limit}B")
    assert [entry["key"] for entry in pruned["entries"]] == [first.key]
    path = store.folder / f"{last.key}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="set aside"):
        result = run("store", "verify", store.folder)
    assert result.exit_code == 1
    assert "1 entries checked, 1 damaged" in result.output
    assert data("ls", store.folder)["entries"] == []


def test_mistakes_are_one_sentence(store, tmp_path):
    for args, message in (
        (("ls", tmp_path), "is no prompt store"),
        (("show", store.folder, "xyz"), "0 entries have a key of 'xyz'"),
        (("prune", store.folder, "--max-age", "old"), "is not an age"),
        (("export", store.folder, "", tmp_path / "x"), "2 entries have a key"),
    ):
        result = run("store", *args)
        assert result.exit_code == 2
        assert message in result.output
        assert "Traceback" not in result.output
