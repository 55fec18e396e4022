"""A filter rule that reads token ids: which tokens stay exact, however the prompt comes."""

from __future__ import annotations

import pytest
import torch
from examples import installed

import kvloom
import probe
import tiny
from kvloom.errors import CacheMisuse
from kvloom.recipe import Protect, Recipe, resolve

IDS = (16, 18)
HEAVY, SINKS, RECENT, PROMPT = 6, 2, 8, 80
RECIPE = (
    f"store:bits=2,group=16,sinks={SINKS},recent={RECENT},outliers={HEAVY},outlier_score=token-ids"
)


@pytest.fixture(autouse=True)
def _installed():
    with installed("my_filter"):
        yield


@pytest.fixture(scope="module")
def model():
    return tiny.llama(head_dim=32)


def prompt(rows: int = 2) -> torch.Tensor:
    """Tokens of which every seventh is one of `IDS`, in other places in each row."""
    ids = torch.randint(20, 200, (rows, PROMPT), generator=torch.Generator().manual_seed(3))
    for row in range(rows):
        ids[row, row + 3 :: 7] = torch.tensor([IDS[row % 2]])
    return ids


def found(cache, row: int) -> list[list[list[int]]]:
    """The logical indices of the outliers of each layer and head."""
    found = [probe.outliers(one).logical_index[row] for one in probe.layers(cache)]
    return [sorted(x) for index in found for x in index.tolist()]


def expected(ids: torch.Tensor) -> list[int]:
    """The newest packed tokens with one of `IDS`: not the sinks, not the window."""
    return [i for i in range(SINKS, len(ids) - RECENT) if int(ids[i]) in IDS][-HEAVY:]


def test_tokens_with_the_ids_stay_exact(model):
    ids, cache = prompt(), kvloom.Cache(model, RECIPE)
    exact = kvloom.Cache(model, "full")
    with torch.inference_mode():
        for one in (cache, exact):
            model(ids, past_key_values=one)
    assert found(cache, 0)[0] != found(cache, 1)[0]
    for row in range(2):
        assert found(cache, row) == [expected(ids[row])] * 2 * len(probe.layers(cache))
    # what the first layer gets is the same in both
    held = probe.outliers(probe.layers(cache)[0])
    whole = probe.tokens(probe.layers(exact)[0]).exact_keys()
    at = held.logical_index.long()[..., None].expand(-1, -1, -1, 32)
    assert torch.equal(held.exact_keys(), whole.gather(2, at))


def test_a_prompt_in_chunks_is_filtered_when_it_ends(model):
    """With compress_after=79, the last chunk of the prompt ends the exact phase."""
    ids, caches = prompt(), []
    for sizes, start in (((PROMPT,), 0), ((50, 1, 29), PROMPT - 1)):
        cache = kvloom.Cache(model, f"{RECIPE},compress_after={start}")
        with torch.inference_mode():
            for part in ids.split(sizes, dim=1):
                model(part, past_key_values=cache)
        caches.append(cache)
    for row in range(2):
        assert found(caches[0], row) == found(caches[1], row)


def test_a_cache_saved_before_the_rule_has_run_keeps_the_ids(model, tmp_path):
    ids, recipe = prompt(), f"{RECIPE},compress_after={PROMPT - 1}"
    cache = kvloom.Cache(model, recipe)
    with torch.inference_mode():
        model(ids[:, :50], past_key_values=cache)
        assert cache.nbytes == cache.recipe.nbytes(50, cache.geometry, batch=2)
        cache.save(tmp_path / "cache")
        cache = kvloom.Cache.load(model, tmp_path / "cache")
        model(ids[:, 50:], past_key_values=cache)
    assert found(cache, 1) == [expected(ids[1])] * 2 * len(probe.layers(cache))


def test_rows_take_their_ids_along(model):
    ids, recipe = prompt(), f"{RECIPE},compress_after={PROMPT - 1}"
    cache = kvloom.Cache(model, recipe)
    with torch.inference_mode():
        model(ids[:, :50], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        model(ids[:, 50:].flip(0), past_key_values=cache)
    assert found(cache, 0) == [expected(ids[1])] * 2 * len(probe.layers(cache))


def test_drafts_change_no_token(model):
    ids = prompt(1)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options, past_key_values=kvloom.Cache(model, RECIPE))
    got = model.generate(
        ids, **options, past_key_values=kvloom.Cache(model, RECIPE), prompt_lookup_num_tokens=3
    )
    assert torch.equal(got, want)


def test_embeddings_are_refused_before_anything_changes(model):
    cache = kvloom.Cache(model, RECIPE)
    embedded = model.get_input_embeddings()(prompt())
    with pytest.raises(CacheMisuse, match="reads token ids, not inputs_embeds; give input_ids"):
        model(inputs_embeds=embedded, past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.inference_mode():
        model(prompt(), past_key_values=cache)
        model(inputs_embeds=embedded[:, :1], past_key_values=cache)  # the rule has run
    assert cache.get_seq_length() == PROMPT + 1


def test_a_function_may_read_ids(model):
    def rule(step):
        at = (step.ids == IDS[0]) * (step.index[:, 0] + 1.0)
        return at[:, None].expand(step.k.shape[:3]).contiguous()

    rule.reads_ids = True
    store = resolve(RECIPE).store
    recipe = Recipe(store=store, protect=Protect(SINKS, RECENT, kvloom.Outliers(HEAVY, rule)))
    ids, cache = prompt(), kvloom.Cache(model, recipe)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    assert found(cache, 0) == [expected(ids[0])] * 2 * len(probe.layers(cache))
