"""Tokens equal those of kvloom's own cache in transformers, in fp32."""

import engines
import pytest

RECIPES = [
    "kivi", "kivi-4", "kivi:bits=3", "kivi:bits=8", "rtn:bits=4", "turbo:bits=4",
    "kivi-4:rotate=true", "near-lossless:sinks=0", "balanced:sinks=0", "kitty:sinks=0",
    "kivi@first 2=full",
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_formats(recipe):
    prompts = engines.prompts([1, 127, 128, 129, 300, 517])
    with engines.engine(recipe) as llm:
        found = engines.generate(llm, prompts, 24)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == engines.in_transformers(recipe, prompt, 24), len(prompt)
