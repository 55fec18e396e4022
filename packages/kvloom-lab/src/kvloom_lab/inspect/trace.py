"""Run a recipe on a text and return the record of every layer and head as plain data.

Decides what is recorded; the page decides how it looks. Step 0 is after the prompt, step s is after
the s-th generated token was read.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from kvloom import Cache, __version__
from kvloom.hf import attachment_restored, observe_steps, read_tokens
from kvloom.progress import Progress
from kvloom.recipe import Recipe, resolve
from kvloom.store import Format, Packed

from .layer_trace import LayerTrace
from .token_text import prompt_ids, token_texts


def trace_recipe(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe | str,
    text: str,
    *,
    context: int | None = None,
    new_tokens: int = 32,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Prefill a text with a recipe's cache, generate greedily, return the record as plain data.

    The model is left as it was.

    Args:
        model: The model, loaded.
        tokenizer: The model's.
        recipe: A recipe or its name.
        text: The prompt.
        context: Prefill only this many tokens.
        new_tokens: How many tokens to generate.
        progress: Called with `new_tokens` + 1 units in all.

    Returns:
        Tokens (texts), prompt_tokens, text_tokens (before it was cut), steps (new_tokens, or fewer
        if the model ends its text), formats of keys and values, views (the useful ones among
        "read", "kept" and "format"), stock_layers (numbers of the layers that kvloom does not
        compress), and layers: number, budget (tokens; None: nothing is evicted), held (tokens in
        the cache of a head, by step, the mean of heads) and heads. A head has

        - gone: by token, the step after which it is evicted, -1: never
        - mass: by step, the share of the exact attention of the step's queries to all tokens so far
          that is on tokens in the cache after the step
        - scores: first and last by token, None: no score, "inf": protected (None: the recipe does
          not score)
        - packed: keys and values by token, the step after which they are packed, -1: never (None:
          the recipe packs nothing)

        A layer with recall has an index, "clusters", "pages" or "topk" (None: it reads its whole
        cache); its heads have (else None)

        - read: by step, the tokens that the step read, its own included, as runs: first, length,
          first, length, ...; the union where query heads select separately
        - read_mass: by step, the share of the exact attention on these
        - indexed: by token, the step after which it is in the index, -1: never
        - parts: by token, the number of its cluster or page in the end, -1: none (None: "topk")

    Raises:
        InputError: The text is empty or too long.
        UnsupportedModel: As `Cache` does.
        IncompatibleRecipe: As `Cache` does.
    """
    resolved = resolve(recipe)
    ids, text_tokens = prompt_ids(model, tokenizer, text, context, new_tokens)
    with attachment_restored(model), torch.inference_mode():
        cache = Cache(model, resolved)
        read, layers = _run(model, cache, ids, new_tokens, progress or (lambda what, units: None))
    store = resolved.store
    return {
        "kvloom": __version__,
        "recipe": resolved.name,
        "toml": resolved.to_toml(),
        "tokens": token_texts(tokenizer, read),
        "prompt_tokens": len(ids),
        "text_tokens": text_tokens,
        "steps": len(read) - len(ids),
        "formats": {
            "keys": _format_text(store.keys, cache),
            "values": _format_text(store.values, cache),
        },
        "views": _views(resolved),
        "stock_layers": sorted({*range(len(cache.layers))} - {*cache.geometry.numbers}),
        "layers": [layer.plain(len(read)) for layer in layers],
    }


def _run(
    model: PreTrainedModel, cache: Cache, ids: list[int], new_tokens: int, on_step: Progress
) -> tuple[list[int], list[LayerTrace]]:
    """Prefill ids and generate; return all ids that were read, and the record of each layer."""
    numbers = cache.geometry.numbers
    size = cache.geometry.kv_heads, len(ids) + new_tokens
    layers = [LayerTrace(i, r.cache, *size) for i, r in zip(numbers, cache.routed, strict=True)]
    observe_steps(cache, lambda look: layers[look.layer].before_attention(look))
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    read, new = list(ids), list(ids)
    for step in range(new_tokens + 1):
        on_step("reading the prompt" if step == 0 else "generating", 0)
        logits = read_tokens(model, torch.tensor([new], device=model.device), cache)
        for layer in layers:
            layer.after_step(step)
        on_step("generating", 1)
        new = logits.argmax(-1).tolist()
        if step == new_tokens or new[0] in ends:
            break
        read += new
    return read, layers


def _views(recipe: Recipe) -> list[str]:
    """Return the views of the page that show something for this recipe."""
    views = ["read"] if recipe.recall is not None else []
    if recipe.keep is not None or (recipe.store.exact and not views):
        views.append("kept")
    return views if recipe.store.exact else [*views, "format"]


def _format_text(fmt: Format | None, cache: Cache) -> str:
    if fmt is None:
        return f"exact, {str(cache.geometry.dtype).removeprefix('torch.')}"
    head_dim = cache.geometry.head_dim
    bits = fmt.bits_a_value(head_dim)
    if not isinstance(fmt, Packed):
        return f"{fmt.kind} ({bits:g} bits a value)"
    group = fmt.group or head_dim
    return f"{fmt.bits} bit per {fmt.axis}, groups of {group} ({bits:g} bits a value)"
