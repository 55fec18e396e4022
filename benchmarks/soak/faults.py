"""Faults: killed writers, interrupts, failed allocations, full disks, lost files of tiers.

A file that a killed writer leaves is one that it wrote whole. A step that is interrupted, or gets
no memory, leaves the cache as before, or a cache that says that it cannot be used. A full disk, a
read-only folder and a process without file descriptors give errors of kvloom alone.
"""

from __future__ import annotations

import copy
import os
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
import zoo
from torch import Tensor
from transformers import PreTrainedModel

import kvloom
from kvloom.errors import CacheMisuse, KvloomError, TierError
from limits import limited
from stopping import StopAt

from .tally import Tally

KILLS, INTERRUPTS, LACKS = 500, 300, 200  # of files and of stores each; of generate; of each other
PACKED = "near-lossless:group=16,residual=32"
TIER = "clusterkv:tokens=40,size=8,sinks=4,full_layers=1,tier=file"
RECIPES = (
    PACKED, "h2o:tokens=40", "clusterkv:tokens=40,size=8,sinks=4,full_layers=1,tier=host",
    "snapkv:tokens=40,window=8,head_share=0.2", "streaming:tokens=40",
    "small:fraction=0.8,group=16,residual=16,recent=8,chunk=50", "full",
)  # fmt: skip
PROMPT, NEW = 90, 24
NOBODY = 65534


def run_all(tally: Tally) -> None:
    """Run every kind of fault."""
    model = zoo.build("llama-gqa", head_dim=32)
    for number, part in enumerate(PARTS):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            part(tally, model, Path(folder), (number + 1) / len(PARTS))


# --- killed writers ------------------------------------------------------------------------------


@contextmanager
def killed(work: Callable[[], None], draw: Random):
    """Kill a child that works until then, after a random time."""
    child = os.fork()
    if child == 0:
        try:
            while True:
                work()
        finally:
            os._exit(1)
    time.sleep(draw.random() ** 2 * 0.2)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself with status {status}"
    yield


def kill_saves(tally: Tally, model: PreTrainedModel, folder: Path, until: float) -> None:
    """Kill a process that saves one of two caches to one path, in turn."""
    path, contents, caches = folder / "x.kv", [], []
    for tokens in (70, PROMPT):
        caches.append(read_prompt(model, PACKED, tokens)[0])
        caches[-1].save(path)
        contents.append(path.read_bytes())

    def work() -> None:
        for cache in caches:
            cache.save(path)

    for seed in tally.numbers(KILLS, until):
        with tally.case(f"kill -9 of a save {seed}"), killed(work, Random(seed)):
            assert path.read_bytes() in contents, "a file of another content"
            kvloom.Cache.load(model, path)
            caches[0].save(path)
            left = sorted(os.listdir(folder))
            assert left == ["x.kv"], f"files are left: {left}"


def kill_puts(tally: Tally, model: PreTrainedModel, folder: Path, until: float) -> None:
    """Kill a process that stores prompts."""
    store, visible = kvloom.PromptStore(folder, max_bytes=1 << 22), 0

    def work() -> None:
        ids = torch.randint(3, 199, (1, 64))
        cache = kvloom.Cache(model, PACKED)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        kvloom.PromptStore(folder, max_bytes=1 << 22).put(cache, ids)

    for seed in tally.numbers(KILLS, until):
        torch.manual_seed(seed)
        with tally.case(f"kill -9 of a put {seed}"), killed(work, Random(seed)):
            store.index._db.close()  # an own connection, as of a new process
            store = kvloom.PromptStore(folder, max_bytes=1 << 22)
            assert store.verify() == {}, "a damaged entry"
            names = {path.stem for path in folder.glob("*.safetensors")}
            assert names == {entry.key for entry in store.entries()}, "files and rows differ"
            assert not list(folder.glob(".*")), "a temporary file is left"
            visible += len(names)
    tally.figures["entries verified"] = visible


# --- steps that stop -----------------------------------------------------------------------------


def prompt(tokens: int = PROMPT) -> Tensor:
    """Return the ids [1, tokens] of the prompt of this length."""
    return torch.randint(3, 199, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def read_prompt(model: PreTrainedModel, recipe: str, tokens: int) -> tuple[kvloom.Cache, Tensor]:
    """Return a cache that has read a prompt, and the prompt."""
    ids = prompt(tokens)
    cache = kvloom.Cache(model, recipe)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache, ids


def step(model: PreTrainedModel, cache: kvloom.Cache, ids: Tensor, keep: int = 0) -> Tensor:
    """Return the logits of one call: of the last `keep` tokens, or of all."""
    with torch.no_grad():
        return model(ids, past_key_values=cache, logits_to_keep=keep).logits


def go_on(model: PreTrainedModel, cache: kvloom.Cache) -> Tensor:
    """Return the logits of a few steps of equal tokens."""
    ids = torch.arange(5, 25)[None]
    parts = (ids[:, :1], ids[:, 1:2], ids[:, 2:])
    return torch.cat([step(model, cache, part) for part in parts], dim=1)


def interrupt(tally: Tally, model: PreTrainedModel, folder: Path, until: float) -> None:
    """Interrupt `generate` at a random moment; go on from what the cache has seen."""
    outcomes: Counter[str] = Counter()
    answers: dict[str, tuple[Tensor, list[Tensor], float]] = {}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for seed in tally.numbers(INTERRUPTS, until):
        draw = Random(seed)
        recipe = RECIPES[seed % len(RECIPES)]
        if recipe not in answers:
            answers[recipe] = answer(model, recipe)
        ids, logits, seconds = answers[recipe]
        cache = kvloom.Cache(model, recipe)
        with tally.case(f"SIGINT in {recipe} {seed}"):
            former = signal.signal(signal.SIGVTALRM, stop)
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, max(1e-4, draw.random() * seconds))
                model.generate(ids[:, :PROMPT], past_key_values=cache, **greedy(NEW))
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                outcomes["too late"] += 1
            except KeyboardInterrupt:
                outcomes[went_on(model, cache, ids, logits)] += 1
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.signal(signal.SIGVTALRM, former)
    tally.figures["interrupts"] = dict(outcomes)


def greedy(tokens: int) -> dict:
    """Return the options of `generate`."""
    return {
        "max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip


def answer(model: PreTrainedModel, recipe: str) -> tuple[Tensor, list[Tensor], float]:
    """Return a prompt with its answer, the logits of its steps, and the processor's seconds."""
    _, ids = read_prompt(model, recipe, PROMPT)
    began = time.process_time()
    cache = kvloom.Cache(model, recipe)
    out = model.generate(
        ids, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **greedy(NEW)
    )
    return out.sequences, list(out.logits), time.process_time() - began


def went_on(model: PreTrainedModel, cache: kvloom.Cache, ids: Tensor, logits: list[Tensor]) -> str:
    """Assert that a cache goes on as an uninterrupted one, or says that it cannot be used."""
    seen = {layer.get_seq_length() for layer in cache.layers}
    try:
        assert len(seen) == 1, f"layers have seen {seen} tokens"
        (begin,) = seen
        ends = range(max(begin + 1, PROMPT), PROMPT + NEW)
        for end in ends[:4]:
            found = step(model, cache, ids[:, begin:end], keep=1)[:, -1]  # as `generate` does
            assert torch.equal(found, logits[end - PROMPT]), f"other logits at token {end}"
            begin = end
    except CacheMisuse:
        return "refused"
    return "as before"


def fail_allocations(tally: Tally, model: PreTrainedModel, folder: Path, until: float) -> None:
    """Fail every torch operation of a step in turn."""
    kinds = [(recipe, tokens) for recipe in RECIPES for tokens in (1, 18)]
    for number, (recipe, tokens) in enumerate(kinds):
        cache, _ = read_prompt(model, recipe, PROMPT)
        expected = go_on(model, copy.deepcopy(cache))
        ids = torch.arange(20, 20 + tokens)[None]
        share = 1 / len(PARTS) * (number + 1) / len(kinds)
        for seed in tally.numbers(10_000, until - 1 / len(PARTS) + share):
            operation = seed - tally.seed
            done = False
            with tally.case(f"no memory at operation {operation} of {recipe}, {tokens} tokens"):
                try:
                    with torch.no_grad(), StopAt(operation, MemoryError):
                        model(ids, past_key_values=cache)
                    done = True
                except MemoryError:
                    seen = {layer.get_seq_length() for layer in cache.layers}
                    assert seen == {PROMPT}, f"layers have seen {seen} tokens"
                    if operation % 10 == 0:
                        found = go_on(model, copy.deepcopy(cache))
                        assert torch.equal(found, expected), "other logits"
            if done:
                break


def lack_memory(tally: Tally, model: PreTrainedModel, folder: Path, until: float) -> None:
    """Let the system refuse memory in a step of many tokens."""
    refused = 0
    for seed in tally.numbers(LACKS, until):
        draw, recipe = Random(seed), RECIPES[seed % len(RECIPES)]
        cache, _ = read_prompt(model, recipe, PROMPT)
        expected = go_on(model, copy.deepcopy(cache))
        ids = torch.randint(3, 199, (1, 800))
        with tally.case(f"no memory of the system in {recipe} {seed}"):
            try:
                with limited("AS", draw.randrange(1 << 23)):
                    step(model, cache, ids)
            except KvloomError as error:
                raise AssertionError("a failed allocation raised an error of kvloom") from error
            except (MemoryError, RuntimeError):
                refused += 1
                assert torch.equal(go_on(model, cache), expected), "other logits"
    tally.figures["steps without memory"] = refused


# --- disks and files -----------------------------------------------------------------------------


@contextmanager
def read_only(folder: Path):
    """Let a block write to no folder."""
    if os.getuid():
        os.chmod(folder, 0o555)
    else:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if os.getuid():
            os.chmod(folder, 0o755)
        else:
            os.seteuid(0)


def lack_of_files(tally: Tally, model: PreTrainedModel, folder: Path, until: float) -> None:
    """Save, load, store and offload with a full disk, a read-only folder, and no descriptors."""
    cache, stored = read_prompt(model, PACKED, 128)
    path, store = folder / "x.kv", kvloom.PromptStore(folder / "store")
    cache.save(path)
    store.put(cache, stored)
    ids = torch.cat([stored, stored], dim=1)
    whole = path.read_bytes()

    def offload() -> None:
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        try:
            read_prompt(model, TIER, PROMPT)
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]

    def put() -> None:
        other = torch.randint(3, 199, (1, 64))
        fresh = kvloom.Cache(model, PACKED)
        step(model, fresh, other)
        store.put(fresh, other)

    work = {
        "save": lambda: cache.save(path), "load": lambda: kvloom.Cache.load(model, path),
        "put": put, "look up": lambda: store.longest(model, PACKED, ids), "tier": offload,
        "open a store": lambda: kvloom.PromptStore(folder / "store").entries(),
    }  # fmt: skip
    outcomes: Counter[str] = Counter()
    for seed in tally.numbers(LACKS, until):
        draw, name = Random(seed), list(work)[seed % len(work)]
        lacks = {
            "a full disk": lambda draw=draw: limited("FSIZE", draw.randrange(len(whole))),
            "a read-only folder": lambda: read_only(folder),
            "no descriptors": lambda draw=draw: limited("NOFILE", draw.randrange(3)),
        }
        for lack, limit in lacks.items():
            with tally.case(f"{name} with {lack} {seed}"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                try:
                    with limit():
                        work[name]()
                    outcomes["done"] += 1
                except KvloomError:
                    outcomes["refused"] += 1
                finally:
                    signal.signal(signal.SIGXFSZ, before)
                assert path.read_bytes() == whole, "the file has changed"
                found = store.longest(model, PACKED, ids)[1]
                assert found == 128, f"the store has {found} of 128 tokens"
                left = [x for x in os.listdir(folder) if x not in ("x.kv", "store")]
                assert left == [], f"files are left: {left}"
    tally.figures["without disk"] = dict(outcomes)


def lose_tiers(tally: Tally, model: PreTrainedModel, folder: Path, until: float) -> None:
    """Cut off, or remove, a file of a tier between two steps."""
    outcomes: Counter[str] = Counter()
    tempfile.tempdir = str(folder)
    try:
        for seed in tally.numbers(LACKS, until):
            draw = Random(seed)
            with tally.case(f"a lost file of a tier {seed}"):
                cache, _ = read_prompt(model, TIER, PROMPT)
                expected = go_on(model, copy.deepcopy(cache))
                path = draw.choice(sorted(folder.glob("*.kv")))
                size = path.stat().st_size
                if draw.random() < 0.3:
                    path.unlink()
                else:
                    os.truncate(path, draw.randrange(size + 1))
                try:
                    found = go_on(model, cache)
                    assert torch.equal(found, expected), "other logits"
                    outcomes["as before"] += 1
                except TierError:
                    outcomes["refused"] += 1
                    refuses(lambda cache=cache: go_on(model, cache))
                del cache
    finally:
        tempfile.tempdir = None
    tally.figures["lost files"] = dict(outcomes)


def refuses(use: Callable[[], object]) -> None:
    """Assert that a cache says that it cannot be used."""
    try:
        use()
    except CacheMisuse:
        return
    raise AssertionError("a cache without its tokens goes on")


PARTS = (
    kill_saves, kill_puts, interrupt, fail_allocations, lack_memory, lack_of_files, lose_tiers,
)  # fmt: skip
