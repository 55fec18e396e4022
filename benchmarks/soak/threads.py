"""Threads and processes: a model in a thread pool, attached by several threads, forked, spawned.

Every answer is that of one thread alone, or an error of kvloom says what to do.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import torch
import zoo
from torch import Tensor
from transformers import PreTrainedModel

import kvloom
from kvloom.errors import KvloomError

from .faults import PACKED, RECIPES, greedy, prompt
from .tally import Tally

CASES, THREADS, NEW = 1_000, 4, 6


def run_all(tally: Tally) -> None:
    """Run every way of sharing a model."""
    model = zoo.build("llama-gqa", head_dim=32)
    expected = {recipe: answer(model, recipe) for recipe in RECIPES}
    parts = (own_caches, attached, forked, spawned, compiled)
    for number, part in enumerate(parts):
        for seed in tally.numbers(CASES, (number + 1) / len(parts)):
            with tally.case(f"{part.__name__} {seed}"):
                part(model, expected, Random(seed))


def answer(model: PreTrainedModel, recipe: str | None) -> Tensor:
    """Return the answer by a cache of the recipe; None: by what is attached."""
    torch.set_num_threads(1)  # a setting of each thread
    cache = {} if recipe is None else {"past_key_values": kvloom.Cache(model, recipe)}
    return model.generate(prompt(), **cache, **greedy(NEW))


def own_caches(model: PreTrainedModel, expected: dict[str, Tensor], draw: Random) -> None:
    """Let threads answer by caches of different recipes at once."""
    recipes = draw.choices(RECIPES, k=THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda recipe: answer(model, recipe), recipes))
    for recipe, found in zip(recipes, answers, strict=True):
        assert torch.equal(found, expected[recipe]), f"another answer by {recipe}"


def attached(model: PreTrainedModel, expected: dict[str, Tensor], draw: Random) -> None:
    """Let threads attach one recipe, and answer, at once."""
    recipe = draw.choice(RECIPES)

    def work(_: int) -> Tensor:
        kvloom.attach(model, recipe)
        return answer(model, None)

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(work, range(THREADS)))
    finally:
        kvloom.detach(model)
    assert all(torch.equal(found, expected[recipe]) for found in answers), "another answer"
    plain = model.generate(prompt(), **greedy(NEW))
    assert torch.equal(plain, expected["full"]), "detached, the model gives another answer"


def in_process(kind: str, work: Callable, *arguments: object) -> None:
    """Run work in another process; raise `AssertionError` with its error."""
    context = multiprocessing.get_context(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "error"
        process = context.Process(target=guarded, args=(path, work, *arguments))
        process.start()
        process.join(110)
        if process.is_alive():
            process.kill()
            raise AssertionError("the process does not end")
        error = path.read_text() if path.exists() else f"status {process.exitcode}"
        assert error == "done", error


def guarded(path: Path, work: Callable, *arguments: object) -> None:
    """Write "done", or the error of work, to a file."""
    try:
        work(*arguments)
        path.write_text("done")
    except BaseException:
        path.write_text(traceback.format_exc().strip().splitlines()[-1])


def forked(model: PreTrainedModel, expected: dict[str, Tensor], draw: Random) -> None:
    """Answer in a fork, with a cache that the parent began."""
    recipe = draw.choice(RECIPES)
    cache = kvloom.Cache(model, recipe)
    ids = prompt()
    with torch.no_grad():
        model(ids[:, :60], past_key_values=cache)
        if draw.random() < 0.5:
            model(ids[:, 60:], past_key_values=cache)
    begun = cache.get_seq_length()

    def work() -> None:
        assert torch.equal(answer(model, recipe), expected[recipe]), "another answer"
        with torch.no_grad():
            model(ids[:, begun - 1 :], past_key_values=cache)
        assert cache.get_seq_length() == 91

    in_process("fork", work)
    assert cache.get_seq_length() == begun


def spawned(model: PreTrainedModel, expected: dict[str, Tensor], draw: Random) -> None:
    """Answer in a new process, from a saved cache."""
    recipe = draw.choice(RECIPES)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.kv")
        cache = kvloom.Cache(model, recipe)
        with torch.no_grad():
            logits = model(prompt(), past_key_values=cache).logits[:, -1:]
            cache.save(path)
            following = model(logits.argmax(-1), past_key_values=cache).logits
        in_process("spawn", load_and_step, path, logits.argmax(-1), following)


def load_and_step(path: str, ids: Tensor, expected: Tensor) -> None:
    """Assert that a saved cache gives the expected logits in this process."""
    torch.set_num_threads(1)
    model = zoo.build("llama-gqa", head_dim=32)
    with torch.no_grad():
        logits = model(ids, past_key_values=kvloom.Cache.load(model, path)).logits
    assert torch.equal(logits, expected), "other logits"


def compiled(model: PreTrainedModel, expected: dict[str, Tensor], draw: Random) -> None:
    """Answer by a compiled model, or be told why not."""
    recipe = draw.choice([PACKED, *RECIPES])
    torch._dynamo.reset()
    wrapped = torch.compile(model, backend="eager")
    try:
        found = wrapped.generate(
            prompt(), past_key_values=kvloom.Cache(wrapped, recipe), **greedy(NEW)
        )
    except KvloomError:
        return
    assert torch.equal(found, expected[recipe]), "another answer"
