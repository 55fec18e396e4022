"""Greedy answers of vLLM's CPU build, with its own cache or with kvloom's packed pages.

    python vllm_answers.py FOLDER

`peers_evidence.py` starts it. FOLDER/job.json has the model, the row's name, the prompts' token
ids, the tokens of each answer and those of each context. This writes FOLDER/answers.json: the ids
of the answers, and the bytes of each context's pages. Prompts that begin alike share pages.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    from vllm import LLM, SamplingParams

    kind = job["row"].removeprefix("vLLM").strip()
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    longest = max(map(len, job["prompts"])) + max(job["tokens"])
    llm = LLM(
        job["model"], dtype="bfloat16", enforce_eager=True, enable_prefix_caching=True, seed=0,
        kv_cache_dtype="fp8" if kind == "fp8" else "auto", kv_cache_memory_bytes=512 << 20,
        max_model_len=longest, additional_config={} if kind in ("", "fp8") else {"kvloom": kind},
    )  # fmt: skip
    wanted = [SamplingParams(max_tokens=n, temperature=0, detokenize=False) for n in job["tokens"]]
    outputs = llm.generate(prompts, wanted)
    figures = {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "nbytes": [nbytes(llm, tokens) for tokens in job["contexts"]],
    }
    (folder / "answers.json").write_text(json.dumps(figures))
    os._exit(0)  # vLLM's own end of a process waits for seconds


def nbytes(llm: Any, tokens: int) -> int:
    """Return the bytes of the pages that a sequence of so many tokens takes."""
    config = llm.llm_engine.vllm_config
    config.model_config.max_model_len = tokens
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    return sum(x.kv_cache_spec.max_memory_usage_bytes(config) * len(x.layer_names) for x in groups)


if __name__ == "__main__":
    main()
