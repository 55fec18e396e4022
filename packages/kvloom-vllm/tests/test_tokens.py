"""Tokens of 64 requests equal those of kvloom's own cache in transformers, in fp32."""

import pytest

import engines

LENGTHS = engines.mixed_lengths(64, 700)
NEW = 16


def tokens(recipe, prompts, **options):
    return engines.run(lambda llm: engines.generate(llm, prompts, NEW), recipe, **options)


SKVQ = "skvq:sinks=0"  # keys before RoPE
AFTER_ROPE = "skvq:group=32,pre_rope=false,sinks=0"
DIVIDED = "smoothquant:bits=4"


@pytest.mark.parametrize(
    "recipe", ["kivi", "near-lossless:sinks=0", "kivi-4@first 2=full", SKVQ, AFTER_ROPE, DIVIDED]
)
def test_64_requests_together(recipe):
    prompts = engines.prompts(LENGTHS)
    assert tokens(recipe, prompts) == engines.in_transformers(recipe, prompts, NEW)


@pytest.mark.parametrize(("recipe", "chunk"), [("kivi", 100), ("kivi", 256), (SKVQ, 200)])
def test_prompts_in_chunks(recipe, chunk):
    """Each chunk reads the pages of earlier chunks as they are packed."""
    prompts = engines.prompts(LENGTHS)
    found = tokens(recipe, prompts, long_prefill_token_threshold=chunk, max_num_seqs=64)
    assert found == engines.in_transformers(recipe, prompts, NEW, chunk=chunk)


def test_prefix_hits():
    """What a hit reads is packed, as if the shared pages had been a chunk of their own."""
    shared = engines.prompts([600], seed=1)[0]
    prompts = [shared + end for end in engines.prompts([1 + 9 * i for i in range(64)], seed=2)]

    def job(llm):
        engines.generate(llm, [shared], 1)
        return engines.generate(llm, prompts, NEW)

    found = engines.run(job, "kivi", enable_prefix_caching=True)
    assert found == engines.in_transformers("kivi", prompts, NEW, cuts=[512])
