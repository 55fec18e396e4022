"""vLLM's CPU build, with its own cache or with kvloom's packed pages, for the scripts that use it.

Importing this sets what vLLM reads from the environment; the first call imports vLLM.
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def engine(job: dict[str, Any], **settings: Any) -> Any:
    """Return an `LLM` of a job's model, in bf16 and not compiled, with the cache of its row.

    Rows are "vLLM", "vLLM fp8", or "vLLM" and a recipe of kvloom. settings: others of `LLM`.
    """
    from vllm import LLM

    kind = job["row"].removeprefix("vLLM").strip()
    return LLM(
        job["model"], dtype="bfloat16", enforce_eager=True, seed=0,
        kv_cache_dtype="fp8" if kind == "fp8" else "auto",
        additional_config={} if kind in ("", "fp8") else {"kvloom": kind}, **settings,
    )  # fmt: skip
