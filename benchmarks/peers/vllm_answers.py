"""Greedy answers of vLLM's CPU build, with its own cache or with kvloom's packed pages.

    python vllm_answers.py FOLDER

`peers_evidence.py` starts it. FOLDER/job.json has the model, the row's name, the prompts' token
ids, the tokens of each answer and those of each context. This writes FOLDER/figures.json: the ids
of the answers, and the bytes of each context's pages. Prompts that begin alike share pages.
"""

from __future__ import annotations

import os
from typing import Any

import common
from vllm_engine import engine


def main() -> None:
    job = common.read_job()
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    longest = max(map(len, job["prompts"])) + max(job["tokens"])
    llm = engine(
        job, enable_prefix_caching=True, kv_cache_memory_bytes=512 << 20, max_model_len=longest
    )  # fmt: skip
    wanted = [SamplingParams(max_tokens=n, temperature=0, detokenize=False) for n in job["tokens"]]
    outputs = llm.generate(prompts, wanted)
    common.write_figures(
        answers=[list(output.outputs[0].token_ids) for output in outputs],
        nbytes=[nbytes(llm, tokens) for tokens in job["contexts"]],
    )
    os._exit(0)  # vLLM's own end of a process waits for seconds


def nbytes(llm: Any, tokens: int) -> int:
    """Return the bytes of the pages that a sequence of so many tokens takes."""
    config = llm.llm_engine.vllm_config
    config.model_config.max_model_len = tokens
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    return sum(x.kv_cache_spec.max_memory_usage_bytes(config) * len(x.layer_names) for x in groups)


if __name__ == "__main__":
    main()
