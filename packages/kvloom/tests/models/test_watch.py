"""What `watch` shows is the attention the model computes, ALiBi included."""

from __future__ import annotations

import pytest
import torch
import zoo

from backends import by_reference
from kvloom.hf.cache import Cache
from kvloom.hf.observe import observe_steps
from kvloom.kernels.score import reference as ref
from kvloom_lab.analyse.attention import weight_blocks

pytestmark = by_reference  # none of this depends on kernels


@pytest.mark.parametrize("name", ["bloom", "mpt", "llama-gqa", "gpt2"])
def test_the_exact_attention_of_every_step(name):
    model, ids = zoo.build(name), zoo.batch(1, 40, (0,))["input_ids"]
    plain = zoo.build(name)
    plain.set_attn_implementation("eager")
    want = [a.double() for a in plain(ids, output_attentions=True).attentions]  # [1, Hq, 40, 40]
    mass, whole = [0.0] * len(want), {}

    def saw(look):
        found = ref.column_mass(look.q, look.keys, look.scale, softcap=look.softcap, bias=look.bias)
        seen = look.keys.shape[2]
        part = want[look.layer][:, :, seen - look.q.shape[2] : seen, :seen].sum(2)
        torch.testing.assert_close(found.double(), part, rtol=1e-3, atol=1e-4)
        mass[look.layer] += found.sum().item()
        if seen == 30:
            bias = None if look.bias is None else look.bias[0]
            rows = weight_blocks(look.q[0], look.keys[0], look.scale, look.softcap, bias)
            whole[look.layer] = torch.cat(list(rows), dim=1)

    cache = Cache(model, "full")
    observe_steps(cache, saw)
    for lo, hi in ((0, 30), (30, 31), (31, 40)):
        model(input_ids=ids[:, lo:hi], past_key_values=cache, use_cache=True)
    assert mass == pytest.approx([40.0 * want[0].shape[1]] * len(want), rel=1e-4)
    for place, weights in whole.items():
        exact = want[place][0, :, :30, :30]
        torch.testing.assert_close(weights.double(), exact, rtol=1e-3, atol=1e-4)
    assert len(whole) == len(want)


def test_the_keys_of_removed_tokens_are_not_shown():
    model, ids, shown = zoo.build("llama-gqa"), zoo.batch(2, 40, (0, 0))["input_ids"], []
    cache = Cache(model, "full")
    observe_steps(cache, lambda step: shown.append(step.keys))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        first = shown[0]
        cache.crop(-10)
        cache.reorder_cache(torch.tensor([1, 0]))
        model(input_ids=ids[:, 30:].flip(0), past_key_values=cache)
        torch.testing.assert_close(shown[-len(cache.layers)], first.flip(0))
        cache.reset()
        model(input_ids=ids[:1, :7], past_key_values=cache)
    assert shown[-1].shape[:3] == (1, first.shape[1], 7)
