"""Whole decode steps with kvpress's presses, beside DynamicCache without one.

A press evicts tokens of transformers' DynamicCache once, after the prompt; a decode step then takes
DynamicCache's time for fewer tokens. These presses are comparable with kvloom's recipes that evict
after the prompt: knorm (the keys' norms), snapkv (as kvloom's), expected attention and streaming
(as kvloom's). Omitted: presses that only mask (AdaKV, which frees no memory), and presses that need
attention matrices (observed attention, which is H2O's mass, in O(N^2) memory). Half of the tokens
are kept. The prompt is not computed: a press gets random keys, values and hidden states. `press_ms`
is the time of the eviction in all layers.
"""

from __future__ import annotations

import time
from functools import partial

import common
import kvpress
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

PRESSES = {
    "kvpress knorm": kvpress.KnormPress,
    "kvpress snapkv": kvpress.SnapKVPress,
    "kvpress expected attention": kvpress.ExpectedAttentionPress,
    "kvpress streaming": kvpress.StreamingLLMPress,
}
EVICTED = 0.5


def model_of(given, longest: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=given.q_heads,
        num_key_value_heads=given.kv_heads,
        head_dim=given.head_dim,
        max_position_embeddings=longest + 4096,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as a press does
    return model


def main() -> None:
    given = common.options(__doc__.splitlines()[0])
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = model_of(given, max(given.contexts))
    embedding = model.get_input_embeddings().weight.nbytes
    weights = sum(p.nbytes for p in model.parameters()) - embedding
    ids, rows = torch.ones(1, 1, dtype=torch.long), []
    with torch.inference_mode():
        for context in given.contexts:
            size = 1, given.kv_heads, context, given.head_dim
            k, v = torch.randn(2, *size).bfloat16()
            hidden = torch.randn(1, context, given.hidden).bfloat16()
            embeddings = model.model.rotary_emb(hidden, torch.arange(context)[None])
            caches, press_ms = {}, {}
            for name, press in {"DynamicCache": None, **PRESSES}.items():
                cache, begin = DynamicCache(), time.perf_counter()
                for i, layer in enumerate(model.model.layers):
                    keys, values = k, v
                    if press is not None:
                        keys, values = press(EVICTED).compress(
                            layer.self_attn, hidden, k, v, None, {"position_embeddings": embeddings}
                        )
                    cache.update(keys, values, i)
                caches[name], press_ms[name] = cache, 1e3 * (time.perf_counter() - begin)
            calls = {
                name: partial(model, input_ids=ids, past_key_values=cache)
                for name, cache in caches.items()
            }
            times = common.alternate(calls, given.repeats)
            for name, cache in caches.items():
                kv = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
                plain = {"DynamicCache": times["DynamicCache"]}
                more = {} if name == "DynamicCache" else {"press_ms": press_ms[name]}
                rows.append(
                    common.row(given, name, context, times[name], kv, weights, plain, **more)
                )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    common.write(given, rows, versions)


if __name__ == "__main__":
    main()
