"""Continuous batches of random requests, with recipes that evict from prompts.

The tokens of each request are those of `generate` with a cache of its own. Where two logits are
nearly equal, rounding decides, and the tokens from there on are not compared.
"""

from __future__ import annotations

from itertools import product
from random import Random

import torch
import transformers
import zoo
from transformers import GenerationConfig, PreTrainedModel

import kvloom
from kvloom.paged import paged

from .faults import greedy
from .tally import Tally

CASES, PAGE = 10_000, 32
ROTATED, SNAPKV = ("rotated:", "rotated:fit=true,"), "snapkv:window=8,"
HEADS = ",head_share=0.2", ",head_share=0.2,layers=joint"  # no cache packs these tokens as pages do
STORES = "", ",store=near-lossless", ",store=turbo"
RECIPES = [
    *product((*ROTATED, SNAPKV), HEADS),
    *product((*ROTATED, "knorm:", "expected:", "triattention:"), STORES),
    (SNAPKV, ""),
]  # fmt: skip
NEAR = 1e-4  # of two logits


def run_all(tally: Tally) -> None:
    """Run batches by number."""
    model = zoo.build("llama-gqa")
    with torch.no_grad():
        model.model.embed_tokens.weight[100:] *= 8  # inputs of different norms
    compared = 0
    for seed in tally.numbers(CASES):
        with tally.case(f"batches {seed}"), torch.no_grad():
            compared += run(model, Random(seed))
    tally.figures["tokens"] = compared


def run(model: PreTrainedModel, draw: Random) -> int:
    """Compare the tokens of a random batch; return how many."""
    recipe, new = drawn(draw), draw.randint(1, 40)
    prompts = []
    for _ in range(draw.randint(1, 6)):
        ids = draw.choice([range(3, 100), range(100, 199), range(3, 199)])
        prompts.append(draw.choices(ids, k=draw.randint(1, 200)))
    options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    settings = transformers.ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=200, max_batch_tokens=draw.choice([250, 2048])
    )
    with kvloom.continuous(model, recipe):
        out = model.generate_batch(
            prompts, generation_config=options, continuous_batching_config=settings
        )
    rule, compared = paged(recipe, PAGE, "", "", evicts=True), 0
    for prompt, result in zip(prompts, out.values(), strict=True):
        assert not result.error, result.error
        alone = model.generate(
            torch.tensor([prompt]), past_key_values=kvloom.Cache(model, rule),
            output_logits=True, return_dict_in_generate=True, **greedy(new),
        )  # fmt: skip
        expected = alone.sequences[0, len(prompt) :].tolist()
        for number, (found, want) in enumerate(zip(result.generated_tokens, expected, strict=True)):
            best, next_best = alone.logits[number][0].topk(2).values.tolist()
            if found != want and best - next_best < NEAR:
                break
            assert found == want, f"{recipe}: token {number} of a prompt of {len(prompt)}"
            compared += 1
    return compared


def drawn(draw: Random) -> str:
    """Return a recipe that evicts once, after the prompt."""
    score, rest = draw.choice(RECIPES)
    recent = "" if score == SNAPKV else ",recent=8"
    return f"{score}tokens={draw.randint(33, 120)}{recent}{rest}"
