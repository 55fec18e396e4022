"""vLLM engines on the reference model, and the same tokens from kvloom's cache in transformers."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import kvloom_lab
import torch
from kvloom_lab.models import WEIGHTS

import kvloom
from kvloom_vllm.rule import paged

MIB = 1 << 20


class Failed(Exception):
    """An engine that did not start or did not finish, with the message of what it raised."""


def run(job: Callable[[Any], Any], recipe: str | None, **options: Any) -> Any:
    """Start vLLM on the reference model in fp32 with a recipe, and return job(engine).

    vLLM runs one engine a process, so this forks one, which has imported all of it already. Raises
    `Failed` with what the process raised.
    """
    import vllm  # noqa: F401  before the fork

    settings = {
        "model": str(WEIGHTS), "dtype": "float32", "enforce_eager": True, "max_model_len": 2048,
        "kv_cache_memory_bytes": 256 * MIB, "max_num_batched_tokens": 65536, "seed": 0,
        "enable_prefix_caching": False, "disable_log_stats": True,
        "additional_config": {} if recipe is None else {"kvloom": recipe},
    }  # fmt: skip
    return _forked(lambda: _job(job, settings | options))


def _job(job: Callable[[Any], Any], settings: dict[str, Any]) -> Any:
    from vllm import LLM

    return job(LLM(**settings))


def _forked(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a process of its own."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_child, args=(theirs, work))
    process.start()
    theirs.close()
    try:
        failed, found = ours.recv()
    except EOFError:
        failed, found = True, "the process ended"
    process.join()
    if failed:
        raise Failed(found)
    return found


def _child(pipe: Any, work: Callable[[], Any]) -> None:
    try:
        pipe.send((False, work()))
    except BaseException as error:
        pipe.send((True, f"{type(error).__name__}: {error}"))
    finally:
        pipe.close()
        sys.stdout.flush()
        os._exit(0)  # vLLM's own end of a process waits for seconds


def generate(llm: Any, prompts: Sequence[list[int]], new: int, **sampling: Any) -> list[list[int]]:
    """Return `new` greedy tokens for each prompt."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, **sampling)
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False
    )
    return [list(one.outputs[0].token_ids) for one in found]


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths, pieces of English text, each at a place of its own."""
    text = _text()
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(0, len(text) - max(lengths), (len(lengths),), generator=generator)
    return [text[begin : begin + n] for begin, n in zip(begins.tolist(), lengths, strict=True)]


def mixed_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Return lengths from 1 to `longest`, page ends among them."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(1, longest, (count,), generator=generator).tolist()
    ends = [1, 127, 128, 129, 255, 256, 257]
    return [*ends, *some][:count]


def in_transformers(
    recipe: str,
    prompts: Sequence[list[int]],
    new: int,
    *,
    page: int = 128,
    chunk: int = 0,
    cuts: Sequence[int] = (),
) -> list[list[int]]:
    """Return `new` greedy tokens of each prompt by kvloom's cache that packs as vLLM's pages.

    chunk: the tokens of a chunk of a prompt, 0: all. cuts: the ends of the chunks before the last.
    Runs in a process of its own: an engine does not start in one that has imported llvmlite.
    """

    def ends(prompt: list[int]) -> list[int]:
        return [*(range(chunk, len(prompt), chunk) if chunk else cuts), len(prompt)]

    def work() -> list[list[int]]:
        model = kvloom_lab.reference_model(torch.float32)
        cut = paged(recipe, page)
        return [_greedy(model, kvloom.Cache(model, cut), one, ends(one), new) for one in prompts]

    return _forked(work)


@torch.no_grad()
def _greedy(model: Any, past: Any, prompt: list[int], ends: list[int], new: int) -> list[int]:
    ids, begin, found = torch.tensor([prompt]), 0, []
    for end in ends:
        logits = model(ids[:, begin:end], past_key_values=past).logits
        begin = end
    while True:
        found.append(int(logits[0, -1].argmax()))
        if len(found) == new:
            return found
        logits = model(torch.tensor([found[-1:]]), past_key_values=past).logits


@cache
def _text() -> list[int]:
    license_text = (WEIGHTS / "README.md").read_text(encoding="utf-8")
    tokenizer = kvloom_lab.reference_tokenizer()
    ids = tokenizer(license_text, add_special_tokens=False)["input_ids"]
    while len(ids) < 8000:
        ids = ids + ids[::-1]
    return ids
