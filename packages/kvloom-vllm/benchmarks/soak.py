"""Many concurrent requests to an OpenAI-compatible server of vLLM with kvloom.

    python benchmarks/soak.py --recipe near-lossless --concurrent 200 --minutes 10 --out soak.json

Starts the server on the reference model in fp32. The server answers every prompt alone first. Then
so many clients ask for the same prompts at random, with random numbers of new tokens, and every
answer is compared: see `answers`. Prompts are text of up to 300 tokens, each computed in one chunk,
without prefix caching; the cache holds all requests. Some clients leave before their answer.
Memory is sampled every few seconds; it is flat if it grows by less than 1% of its size between the
middle and the end of the time. The first half is the warm-up, in which the server touches its cache
and its allocators fill. `none` is vLLM without kvloom.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from kvloom_lab.models import WEIGHTS, reference_tokenizer
from kvloom_lab.workload.text import library_text, tokenize

import memory
import one_engine
from answers import Answer, Server, judged

PROMPTS, LONGEST, MOST_NEW = 32, 300, 128
LEAVES = 25
"""Of so many requests, a client leaves one early."""
FLAT = 0.01


def main() -> None:
    """Run the server and the requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="near-lossless")
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--port", type=int, default=8731)
    parser.add_argument("--mib", type=int, default=512, help="memory of the cache")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    server = subprocess.Popen(
        [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(WEIGHTS),
            "--served-model-name", "soak", "--enforce-eager", "--max-model-len", "512",
            "--dtype", "float32", "--kv-cache-memory-bytes", str(asked.mib << 20),
            "--port", str(asked.port), "--max-num-seqs", str(asked.concurrent + 8),
            "--max-num-batched-tokens", str(max(8192, asked.concurrent * (LONGEST + 1))),
            "--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--additional-config",
            json.dumps({} if asked.recipe in one_engine.OWN else {"kvloom": asked.recipe}),
        ],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends too
    try:
        found = asyncio.run(soak(asked, server.pid))
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    print(json.dumps({name: x for name, x in found.items() if name != "memory"}, indent=1))
    settings = {name: getattr(asked, name) for name in ("recipe", "concurrent", "minutes", "mib")}
    one_engine.write(asked.out, {"model": "reference", **settings}, dtype="float32", **found)


async def soak(asked: argparse.Namespace, pid: int) -> dict[str, Any]:
    """Keep requests open until the time is over; return what was counted and sampled."""
    counted: Counter[str] = Counter()
    # a connection a request: a server may close an idle one just when a client uses it again
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        server = Server(session, f"http://127.0.0.1:{asked.port}")
        await ready(server)
        prompts = texts()
        alone = [await server.ask(prompt, MOST_NEW, likely=True) for prompt in prompts]
        print(f"{len(alone)} prompts were answered alone", flush=True)
        seconds = 60 * asked.minutes
        end = time.monotonic() + seconds
        _, samples, _ = await asyncio.gather(
            asyncio.gather(
                *(
                    client(server, random.Random(seed), prompts, alone, counted, end)
                    for seed in range(asked.concurrent)
                )
            ),
            memory.watch(pid, seconds, min(5.0, seconds / 20)),
            progress(counted, end),
        )
        after = Counter[str]()
        for prompt, first in zip(prompts, alone, strict=True):
            after[judged((await server.ask(prompt, MOST_NEW)).tokens, first, MOST_NEW)] += 1
        metrics = await server.metrics()
    late = [one for one in samples if one[0] >= seconds / 2]
    slope = memory.growth(late)
    grown = slope * asked.minutes / 2
    return {
        "answers": dict(counted), "alone_afterwards": dict(after),
        "preemptions": metrics["vllm:num_preemptions_total"],
        "cache_in_use_afterwards": metrics["vllm:kv_cache_usage_perc"],
        "mib_at_start": samples[0][1], "mib_at_half": late[0][1], "mib_at_end": late[-1][1],
        "second_half_mib_per_minute": slope, "second_half_mib": grown,
        "flat": grown < FLAT * late[0][1], "memory": [list(one) for one in samples],
    }  # fmt: skip


async def client(
    server: Server, pick: random.Random, prompts: list[list[int]], alone: list[Answer],
    counted: Counter[str], end: float,
) -> None:  # fmt: skip
    """Ask one request after the other until the end, and count what the answers are."""
    while time.monotonic() < end:
        which, new = pick.randrange(len(prompts)), pick.randrange(1, MOST_NEW + 1)
        patience = pick.uniform(0.1, 2) if pick.randrange(LEAVES) == 0 else None
        try:
            answer = await server.ask(prompts[which], new, patience=patience)
            counted[judged(answer.tokens, alone[which], new)] += 1
        except TimeoutError:
            counted["left"] += 1
        except (aiohttp.ClientError, KeyError) as error:
            counted["lost"] += 1
            print(f"lost: {type(error).__name__}: {error}", file=sys.stderr)


async def progress(counted: Counter[str], end: float) -> None:
    """Print what was counted, every half minute."""
    while (rest := end - time.monotonic()) > 0:
        print(f"{rest:.0f} s left: {dict(counted)}", flush=True)
        await asyncio.sleep(min(30, rest))


def texts() -> list[list[int]]:
    """Return pieces of text as prompts, of 5 to `LONGEST` tokens."""
    ids, pick = tokenize(reference_tokenizer(), library_text()), random.Random(0)
    begins = [pick.randrange(len(ids) - LONGEST) for _ in range(PROMPTS)]
    return [ids[begin : begin + pick.randint(5, LONGEST)].tolist() for begin in begins]


async def ready(server: Server) -> None:
    """Wait until the server answers; raises `TimeoutError` after five minutes."""
    for _ in range(300):
        if await server.healthy():
            return
        await asyncio.sleep(1)
    raise TimeoutError("the server did not start; run it alone to see why")


if __name__ == "__main__":
    main()
