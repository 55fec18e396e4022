"""Time to the first token, and tokens per second, of recipes beside an unmodified vLLM, as JSON.

    python benchmarks/throughput.py --recipes none,near-lossless --prompts 3968,8064 --out one.json
    python benchmarks/throughput.py --prompts 256 --new 1024 --batch 16 --mib 240 --out many.json

All engines live in processes of their own, with the same memory, model and prompts, and work in
turns; figures are medians over the turns. Ratios are to the first engine, `none`: vLLM without
kvloom; `fp8` is vLLM's own format. A batch that does not fit is preempted by vLLM: such figures
contain what it computes again. Prompts are arbitrary token ids: the figures are those of speed and
memory, not of quality. Each time is of the wall and of the processor (of all threads of the
engine's process), which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import one_engine
from one_engine import Clock, Engine

WARM = 300  # tokens of the first prompt, which is not measured: it compiles kernels


def main() -> None:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, reference, or a folder")
    parser.add_argument("--recipes", default="none,near-lossless")
    parser.add_argument("--prompts", default="3968,8064", help="tokens of a prompt")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--new", type=int, default=128, help="new tokens of a request")
    parser.add_argument("--mib", type=int, default=1024, help="memory of the cache")
    parser.add_argument("--turns", type=int, default=3, help="their median counts")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lengths = [int(one) for one in asked.prompts.split(",")]
    recipes = asked.recipes.split(",")
    options = {
        "max_model_len": max(WARM, *lengths) + asked.new, "max_num_seqs": asked.batch,
        "kv_cache_memory_bytes": asked.mib << 20, "disable_log_stats": False,
    }  # fmt: skip
    model, rows = one_engine.folder(asked.model), []
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(model, name, **options)) for name in recipes}
        fits = {name: one.run(one_engine.tokens_that_fit) for name, one in engines.items()}
        for one in engines.values():
            one.run(measure, WARM, 1, 4)
        for length in lengths:
            turns: dict[str, list[dict[str, float]]] = {name: [] for name in recipes}
            for turn in range(asked.turns):
                for name, one in engines.items():
                    found = one.run(measure, length, asked.batch, asked.new)
                    turns[name].append(found)
                    print(f"turn {turn}, {length} tokens, {name}: {_line(found)}", flush=True)
            rows.append({"prompt": length, "engines": compared(turns)})
    settings = {
        "model": asked.model, "batch": asked.batch, "new": asked.new, "cache_mib": asked.mib,
        "turns": asked.turns,
        "note": "other work shared the machine, so processor time is the fairer figure",
    }  # fmt: skip
    one_engine.write(asked.out, settings, tokens_that_fit=fits, prompts=rows)


def measure(llm: Any, length: int, batch: int, new: int) -> dict[str, float]:
    """Return seconds to the first token, tokens per second, and how often vLLM preempted.

    length: tokens of each prompt. The time to the first token is the mean over the requests. With
    one request, decoding is measured alone too.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    size = engine.vllm_config.model_config.get_vocab_size() - 8
    wanted = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    before, clock = _preemptions(llm), Clock()
    for i in range(batch):
        prompt = [(7 + i * 31 + j * 17) % size for j in range(length)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, wanted)
    first: dict[str, dict[str, float]] = {}
    while engine.has_unfinished_requests():
        done = engine.step()
        now = clock.read()
        for one in done:
            first.setdefault(one.request_id, now)
    found = {"preemptions": float(_preemptions(llm) - before)}
    for time in ("wall_s", "cpu_s"):
        kind = time.removesuffix("_s")
        mean = statistics.mean(one[time] for one in first.values())
        found[f"first_token_{time}"] = mean
        found[f"tokens_per_{time}"] = batch * new / now[time]
        if batch == 1:
            found[f"decode_tokens_per_{kind}_s"] = (new - 1) / (now[time] - mean)
    return found


def compared(turns: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return of each engine the medians, all turns, and the medians of the ratios in each turn.

    A ratio is that of a figure to the first engine's.
    """
    first, *_ = turns.values()
    rows = []
    for name, mine in turns.items():
        ratios = [
            {key: one[key] / base[key] for key in one if base[key]}
            for one, base in zip(mine, first, strict=True)
        ]
        same = set.intersection(*(set(one) for one in ratios))
        ratios = [{key: one[key] for key in one if key in same} for one in ratios]
        rows.append(
            {"engine": name, "median": one_engine.medians(mine),
             "ratio": one_engine.medians(ratios), "turns": mine}
        )  # fmt: skip
    return rows


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {one_engine.rounded(x)}" for name, x in found.items())


def _preemptions(llm: Any) -> int:
    return sum(int(one.value) for one in llm.get_metrics() if one.name == "vllm:num_preemptions")


if __name__ == "__main__":
    main()
