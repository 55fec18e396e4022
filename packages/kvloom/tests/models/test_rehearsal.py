"""A rehearsal of a cache's steps needs the kernels that the steps of the cache need."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import kvloom
from kvloom.cache.rehearsal import rehearse
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend.cpu import coverage

RECIPES = ["near-lossless", "small", "clusterkv"]
RARE = ["full", "kivi", "balanced", "tiny", "h2o", "quest", "streaming", "kivi@first 1=full"]


@pytest.mark.parametrize("kernels", ["ref"], indirect=True)  # it selects kernels itself
@pytest.mark.parametrize(
    "recipe", [*RECIPES, *(pytest.param(x, marks=pytest.mark.slow) for x in RARE)]
)
def test_attention_kernels_are_those_of_the_cache(recipe, kernels, monkeypatch):
    """Compiles none of them: what would be compiled is compared."""
    wanted: set[object] = set()

    def kernel(*case, **options):
        wanted.add((case, tuple(sorted(options.items()))))
        raise RuntimeError("not compiled")

    def needed(run):
        wanted.clear()
        with monkeypatch.context() as patch, dispatch.use("auto"):
            patch.setattr(coverage, "kernel", kernel)
            patch.setattr(ops.attend, "bindings", {})
            with pytest.warns(UserWarning, match="not compiled"):
                run()
        return set(wanted)

    config = tf.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 64, (1, 1600))
    cache = kvloom.Cache(model, recipe)
    rehearsed = needed(lambda: rehearse(cache.rehearsals()))
    used = needed(
        lambda: model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3
        )
    )
    assert used
    assert used <= rehearsed
