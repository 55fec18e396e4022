"""Decode steps of transformers' continuous batching with packed pages, and how many requests fit.

SmolLM2 decodes requests of about 1k tokens together: by transformers' own pages, by exact pages of
kvloom (`full`), and by packed pages, in turns. `padded` is `kvloom.Cache` with the same requests as
one left-padded batch, in `model(...)`. A figure is the median processor time of the steps in which
every request decodes. The requests that fit are those of the same number of blocks.

    python benchmarks/continuous.py
    python benchmarks/continuous.py --rounds 1 --recipes kivi
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from unittest.mock import patch

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

import kvloom
import record
from evidence import prose
from kvloom_lab.models import load

PAGE, BLOCKS, STOCK = 128, 120, "transformers"


def generation(new: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)


def settings(tokens: int) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=BLOCKS, max_batch_tokens=tokens, safety_margin=0.0
    )


def pages(model, recipe: str):
    """Return the block in which the model batches with a recipe; `STOCK`: by itself."""
    return nullcontext() if recipe == STOCK else kvloom.continuous(model, recipe)


def continuous(model, recipe: str, prompts: list[list[int]], new: int) -> list[float]:
    """Return the seconds of each step in which all requests decode."""
    seconds: list[float] = []
    body = ContinuousBatchingManager._generation_loop_body

    def timed(manager, processor, bootstrapping):
        begin = time.process_time()
        go_on = body(manager, processor, bootstrapping)
        io = processor.inputs_and_outputs
        if io.num_q_tokens == len(io.requests_in_batch) == len(prompts):
            seconds.append(time.process_time() - begin)
        return go_on

    with (
        pages(model, recipe),
        patch.object(ContinuousBatchingManager, "_generation_loop_body", timed),
    ):
        found = model.generate_batch(
            prompts, generation_config=generation(new),
            continuous_batching_config=settings(len(prompts[0]) + new),
        )  # fmt: skip
    assert not any(one.error for one in found.values())
    return seconds


@torch.inference_mode()
def padded(model, recipe: str, prompts: list[list[int]], new: int) -> list[float]:
    """Return the seconds of each decode step of kvloom's cache with one padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(x)) + x for x in prompts])
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts])
    cache, seconds = kvloom.Cache(model, recipe), []
    for _ in range(new):
        begin = time.process_time()
        logits = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1)[:, None]
        seconds.append(time.process_time() - begin)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    kvloom.detach(model)
    return seconds[1:]


def requests_that_fit(model, recipe: str, tokens: int) -> int:
    """Return how many requests of so many tokens fit into the blocks."""
    with pages(model, recipe):
        manager = model.init_continuous_batching(generation(1), settings(tokens + 1))
        processor = manager._create_batch_processor()
        (blocks,) = processor.cache.cache_allocators.values()
        each = -(-tokens // PAGE) if recipe == STOCK else blocks.blocks_for(tokens)
    return blocks.num_blocks // each


def main() -> None:
    recipes = ["near-lossless", "kivi-4"]
    options = record.options(
        __doc__, requests=8, tokens=1024, new_tokens=24, rounds=3, recipes=recipes,
        dtype="float32",
    )  # fmt: skip
    torch.set_num_threads(1)
    model, tokenizer = load("smollm2", options.dtype)
    ids = tokenizer(prose(), verbose=False).input_ids
    apart = len(ids) // options.requests
    prompts = [
        ids[i * apart :][: options.tokens - options.new_tokens - 4 * i]
        for i in range(options.requests)
    ]
    names = (STOCK, "full", *options.recipes)
    runs = {(name, "pages"): continuous for name in names}
    runs |= {(name, "padded"): padded for name in options.recipes}
    seconds: dict[tuple, list[float]] = {run: [] for run in runs}
    for (name, _kind), run in runs.items():  # compile kernels
        run(model, name, [x[: PAGE + 2] for x in prompts], 4)
    for i in range(options.rounds):
        for (name, kind), run in runs.items():
            print(f"round {i + 1} of {options.rounds}: {name}, {kind}", flush=True)
            seconds[name, kind] += run(model, name, prompts, options.new_tokens)
    median = {run: statistics.median(x) for run, x in seconds.items()}
    rows = []
    for name in names:
        took = median[name, "pages"]
        row = {
            "recipe": name, "ms": 1e3 * took,
            "times_transformers": took / median[STOCK, "pages"],
            "times_exact_pages": took / median["full", "pages"],
            "requests": requests_that_fit(model, name, options.tokens),
        }  # fmt: skip
        if name in options.recipes:
            row["times_padded"] = took / median[name, "padded"]
        rows.append(row)
        print(
            f"{name:>22}: {row['ms']:7.1f} ms a step, {row['times_transformers']:.2f} of "
            f"transformers', {row['times_exact_pages']:.2f} of exact pages', "
            f"{row.get('times_padded', float('nan')):.2f} of a padded batch's; "
            f"{row['requests']} requests fit"
        )
    conditions = {name: getattr(options, name) for name in ("requests", "tokens", "dtype")}
    record.write("continuous", {"environment": record.environment(**conditions), "rows": rows})


if __name__ == "__main__":
    main()
