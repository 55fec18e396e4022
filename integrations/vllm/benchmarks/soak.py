"""Many concurrent requests to an OpenAI-compatible server of vLLM with kvloom.

    python benchmarks/soak.py --recipe near-lossless --concurrent 200 --minutes 10

Starts the server on the reference model, keeps so many requests open, and checks that every answer
arrives whole. The server answers some prompts alone first. Under load, it divides prompts into
other chunks and finds other prefixes, so the answer may differ: equal answers are only counted.
Prompts in one chunk get equal answers: with --no-prefix-caching, and with --step-tokens for the
prompts of all clients together, 1,500 tokens each. Prints one JSON
object: answers, failures, and the server's memory in MiB at the start and after each sixth of the
time. vLLM's pool of --mib counts from the first use of each block. `none` is vLLM without kvloom.
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
from pathlib import Path

import aiohttp

from kvloom.reference import WEIGHTS


def main() -> None:
    """Run the server and the requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="near-lossless")
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--port", type=int, default=8731)
    parser.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="without it, answers must equal those of the same prompts alone",
    )
    parser.add_argument("--mib", type=int, default=256, help="memory of the cache")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of a step at most")
    asked = parser.parse_args()
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
    server = subprocess.Popen(
        [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(WEIGHTS),
            "--served-model-name", "reference", "--enforce-eager", "--max-model-len", "2048",
            "--kv-cache-memory-bytes", str(asked.mib << 20), "--port", str(asked.port),
            "--max-num-batched-tokens", str(asked.step_tokens),
            "--additional-config",
            json.dumps({} if asked.recipe == "none" else {"kvloom": asked.recipe}),
            "--enable-prefix-caching" if asked.prefix_caching else "--no-enable-prefix-caching",
        ],
        env=os.environ | settings,
        start_new_session=True,
    )  # fmt: skip
    try:
        print(json.dumps(asyncio.run(soak(asked, server.pid)), indent=1))
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


async def soak(asked: argparse.Namespace, pid: int) -> dict[str, object]:
    """Keep requests open until the time is over; return what was counted."""
    url = f"http://127.0.0.1:{asked.port}"
    counted = {"answers": 0, "short": 0, "failed": 0, "equal": 0, "compared": 0}
    pick = random.Random(0)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await ready(session, url)

        async def ask(prompt: list[int], new: int) -> tuple[int, str]:
            body = {
                "model": "reference", "prompt": prompt, "max_tokens": new, "temperature": 0,
                "ignore_eos": True,
            }  # fmt: skip
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                found = await answer.json()
                return found["usage"]["completion_tokens"], found["choices"][0]["text"]

        known = [[pick.randrange(5, 4000) for _ in range(pick.randrange(5, 900))] for _ in range(8)]
        alone = [(await ask(prompt, 32))[1] for prompt in known]
        memory, end = [resident(pid)], time.monotonic() + 60 * asked.minutes

        async def worker(seed: int) -> None:
            mine = random.Random(seed)
            while time.monotonic() < end:
                which = mine.randrange(16)
                new = 32 if which < 8 else mine.randrange(1, 200)
                prompt = (
                    known[which]
                    if which < 8
                    else [mine.randrange(5, 4000) for _ in range(mine.randrange(1, 1500))]
                )
                try:
                    tokens, text = await ask(prompt, new)
                except (aiohttp.ClientError, KeyError):
                    counted["failed"] += 1
                    continue
                counted["answers"] += 1
                counted["short"] += tokens != new
                if which < 8:
                    counted["compared"] += 1
                    counted["equal"] += text == alone[which]

        async def watch() -> None:
            for _ in range(6):
                await asyncio.sleep(10 * asked.minutes)
                memory.append(resident(pid))

        await asyncio.gather(watch(), *(worker(seed) for seed in range(asked.concurrent)))
        after = [(await ask(prompt, 32))[1] for prompt in known]
    return {
        **counted, "equal_alone_afterwards": sum(map(str.__eq__, alone, after)),
        "asked_alone": len(known), "resident_mib": memory,
    }  # fmt: skip


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the server answers; raises `TimeoutError` after five minutes."""
    for _ in range(300):
        try:
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(1)
    raise TimeoutError("the server did not start; run it alone to see why")


def resident(group: int) -> int:
    """Return the MiB in memory of all processes of a process group."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == group:
            total += int(fields[21])
    return total * os.sysconf("SC_PAGE_SIZE") >> 20


if __name__ == "__main__":
    main()
