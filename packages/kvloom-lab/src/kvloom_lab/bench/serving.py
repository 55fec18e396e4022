"""One run of requests that decode together: what a process of `bench throughput` measures.

The process loads the model, warms up, and then reads all prompts and decodes; `trial` has a process
of its own, because what it leaves in memory slows later steps. Tokens
are those of a text, whatever the model would write, so every cache does the same work. A static
batch reads its prompts in parts, where their caches can be joined, so that their activations need
no more memory than the caches. Each part is attended to by itself, so single prompts decode at up
to half the speed.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from statistics import median
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import kvloom
from kvloom.hf import BatchedCaches, can_batch
from kvloom.kernels import companion, compile_seconds
from kvloom.paged import packed_by_page
from kvloom.recipe import Recipe

from ..eval.decoding import divergence
from ..models import load_model
from ..workload import clock
from ..workload.machine import peak_since_reset, reset_peak
from . import transformers_caches
from .timing import problem

PAGE = 128
"""Tokens of a page in continuous batching."""
KL_ROWS = 8  # requests whose distributions are compared with exact ones
DYNAMIC = "DynamicCache"
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What one row of the table runs.

    name: of the row. cache: a recipe, or the name of a cache of transformers. memory: bytes of all
    caches. prompt, new: tokens of a request. predicted_bytes: of one request. part: requests whose
    prompts are read at a time. ids: the text of each request, int64 [batch, prompt + new]. press:
    whether kvpress evicts half of each prompt. blocks: of continuous batching; 0: a static batch.
    """

    name: str
    cache: Recipe | str
    memory: int
    prompt: int
    new: int
    predicted_bytes: int
    part: int
    ids: Tensor
    press: bool = False
    blocks: int = 0

    def __str__(self) -> str:
        return f"{self.name} at {self.prompt:,}+{self.new:,} tokens"

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.ids)


@dataclass
class RunFigures:
    """What one run measured; times are seconds of the wall clock and of the processor.

    batch: requests. first_s: until a request's first token, median. prompt_s: of all but decode_s.
    decode_s: of steps that only decode. decoded: tokens of these steps. kv_bytes: at the end.
    peak_bytes: of the process, above those before the prompts. kl: of the job's trial.
    """

    batch: int
    first_s: float
    prompt_s: tuple[float, float]
    decode_s: tuple[float, float]
    decoded: int
    kv_bytes: int
    peak_bytes: int | None = None
    preemptions: int | None = None
    kl: float | None = None


@dataclass
class Trial:
    """A few requests. kl: mean divergence from exact attention, nats. nbytes: the most of one."""

    kl: float
    nbytes: int


def as_paged(recipe: Recipe) -> Recipe:
    """Return the recipe whose cache packs the tokens that pages pack; raises if pages cannot."""
    return packed_by_page(recipe, PAGE, "continuous batching", "page_size=", evicts=True)


def run(work: Callable[[PreTrainedModel, Job], T], job: Job, *settings: Any) -> T | str:
    """Return what `work`, `figures` or `trial`, returns for a job, or the reason why it failed.

    settings: model, dtype and threads.
    """
    model_name, dtype, threads = settings
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    companion.disable()
    try:
        model = load_model(model_name, dtype)
        return work(model, replace(job, ids=job.ids.to(model.device)))
    except Exception as error:
        return problem(error)


def in_process(work: Callable[[PreTrainedModel, Job], T], job: Job, *settings: Any) -> T | str:
    """Return what `run` returns in a new process, whose memory is then that of the job."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, job, *settings), daemon=True)
    process.start()
    sender.close()
    try:
        found: T | str = receiver.recv()
        process.join(10)
        return found
    except EOFError:
        process.join()
        return (
            f"its process ended with status {process.exitcode}; the system may have ended it for "
            "its memory: give a smaller --memory"
        )
    finally:
        process.kill()
        process.join()


def _send(sender: Any, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that waits
    sender.send(run(*arguments))


def figures(model: PreTrainedModel, job: Job) -> RunFigures:
    """Read all prompts and decode, after a warm-up."""
    return _continuous(model, job) if job.blocks else _static(model, job)


def _now(job: Job) -> tuple[float, float]:
    """Return seconds of the wall clock and of the processor, without compilation."""
    return clock.seconds(job.ids.device), time.process_time() - compile_seconds()


def _since(begin: tuple[float, float], job: Job) -> tuple[float, float]:
    wall, processor = _now(job)
    return wall - begin[0], processor - begin[1]


@torch.inference_mode()
def trial(model: PreTrainedModel, job: Job) -> Trial:
    """Compare a few requests with exact attention, and count their bytes."""
    if job.blocks and isinstance(job.cache, Recipe):
        job = replace(job, cache=as_paged(job.cache))
    ids, steps, nbytes = job.ids[:KL_ROWS, :-1], [], 0
    cache, _ = _read_prompts(model, job, ids)
    for logits in _decode(model, job, cache, ids):
        steps.append(torch.log_softmax(logits.float(), -1))
        nbytes = max(nbytes, _nbytes(cache))
    means = []
    for i, row in enumerate(ids):
        exact = model(row[None], use_cache=False, logits_to_keep=len(steps)).logits.float()
        ours = torch.stack([logp[i] for logp in steps])[None]
        means.append(divergence(torch.log_softmax(exact, -1), ours).mean().item())
    return Trial(sum(means) / len(means), -(-nbytes // len(ids)))


# a static batch


@torch.inference_mode()
def _static(model: PreTrainedModel, job: Job) -> RunFigures:
    _warm_up(model, job)
    reset_peak()
    begin = _now(job)
    cache, ready = _read_prompts(model, job, job.ids)
    read = _since(begin, job)
    for logits in _decode(model, job, cache, job.ids[:, :-1]):
        logits.argmax(-1)
    both = _since(begin, job)
    decode = both[0] - read[0], both[1] - read[1]
    first = median(wall - begin[0] for wall in ready)
    decoded = job.batch * (job.new - 1)
    nbytes, peak = _nbytes(cache), peak_since_reset()
    return RunFigures(job.batch, first, read, decode, decoded, nbytes, peak)


@torch.inference_mode()
def _warm_up(model: PreTrainedModel, job: Job) -> None:
    ids = job.ids[:1, : job.prompt + 2]
    cache, _ = _read_prompts(model, job, ids)
    for _ in _decode(model, job, cache, ids):
        pass


def _new_cache(model: PreTrainedModel, job: Job) -> Any:
    if isinstance(job.cache, Recipe):
        return kvloom.Cache(model, job.cache)
    return transformers_caches.empty(job.cache, model.config)


def _read_prompts(model: PreTrainedModel, job: Job, ids: Tensor) -> tuple[Any, list[float]]:
    """Return a cache that holds the prompts of ids [B, N], and when each of them was read."""
    caches: list[Any] = [_new_cache(model, job)]
    joins = isinstance(caches[0], kvloom.Cache) and can_batch(model, caches)
    joins = joins or job.cache == DYNAMIC
    ready: list[float] = []
    for rows in ids[:, : job.prompt].split(job.part if joins else len(ids)):
        if ready:
            caches.append(_new_cache(model, job))
        with _halved(model) if job.press else nullcontext():
            # a press knows by the positions that a call reads a prompt
            where = (
                {"cache_position": torch.arange(job.prompt, device=ids.device)} if job.press else {}
            )
            model(rows, past_key_values=caches[-1], logits_to_keep=1, **where)
        ready += [clock.seconds(ids.device)] * len(rows)
    return _joined(model, caches), ready


def _joined(model: PreTrainedModel, caches: list[Any]) -> Any:
    """Return one cache with the rows of several."""
    if len(caches) == 1:
        return caches[0]
    if isinstance(caches[0], kvloom.Cache):
        return BatchedCaches(model, caches)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for side in ("keys", "values"):
            joined = torch.cat([getattr(layer, side) for layer in layers])
            for layer in layers:
                setattr(layer, side, None)  # so that its memory is free for the next layer
            setattr(layers[0], side, joined)
    return caches[0]


def _halved(model: PreTrainedModel) -> Any:
    """Return a context in which kvpress evicts half of each prompt that the model reads."""
    return import_module("kvpress").SnapKVPress(compression_ratio=0.5)(model)


def _decode(model: PreTrainedModel, job: Job, cache: Any, ids: Tensor) -> Iterator[Tensor]:
    """Yield the logits [B, V] after each token of ids [B, N] that follows the prompt."""
    for i in range(job.prompt, ids.shape[1]):
        # the cache of a press has fewer tokens than were read
        where = {"position_ids": ids.new_full((len(ids), 1), i)} if job.press else {}
        yield model(ids[:, i : i + 1], past_key_values=cache, **where).logits[:, -1]


def _nbytes(cache: Any) -> int:
    if isinstance(cache, BatchedCaches):
        return sum(member.nbytes for member in cache.caches)
    return cache.nbytes if isinstance(cache, kvloom.Cache) else transformers_caches.nbytes(cache)


# continuous batching of transformers


def _continuous(model: PreTrainedModel, job: Job) -> RunFigures:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = kvloom.continuous(model, job.cache) if isinstance(job.cache, Recipe) else nullcontext()
    prompts = job.ids[:, : job.prompt].tolist()
    evicts = isinstance(job.cache, Recipe) and bool(job.cache.keeps_by_score)
    in_step = job.prompt + job.new * evicts  # a preempted request evicts from its answer, too

    def run(prompts: list[list[int]], new: int) -> Any:
        return model.generate_batch(
            prompts, record_timestamps=True,
            generation_config=GenerationConfig(
                max_new_tokens=new, do_sample=False, eos_token_id=-1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=job.blocks, safety_margin=0.0,
                max_batch_tokens=max(in_step, job.batch),
            ),
        )  # fmt: skip

    with pages:
        run(prompts[:1], 2)
        reset_peak()
        with noted_steps(job) as steps:
            begin = _now(job)
            found = run(prompts, job.new)
            both = _since(begin, job)
    if errors := [state.error for state in found.values() if state.error]:
        raise RuntimeError(errors[0])
    first = median(steps.clock(state.timestamps[0]) - begin[0] for state in found.values())
    decode = steps.wall, steps.processor
    prompt = both[0] - decode[0], both[1] - decode[1]
    return RunFigures(
        job.batch, first, prompt, decode, steps.tokens, steps.nbytes, peak_since_reset(),
        steps.preemptions,
    )  # fmt: skip


@dataclass
class Steps:
    """The steps of continuous batching that only decode: their tokens and seconds.

    nbytes: of all blocks. preemptions: how often a request lost its blocks and began again. ends:
    when each step ended, and the seconds of compiling kernels until then.
    """

    tokens: int = 0
    wall: float = 0.0
    processor: float = 0.0
    nbytes: int = 0
    preemptions: int = 0
    ends: list[tuple[float, float]] = field(default_factory=list)

    def clock(self, timestamp: float) -> float:
        """Return a time of `time.perf_counter` within a step as one of `workload.clock`."""
        return timestamp - next(compiled for end, compiled in self.ends if end >= timestamp)


@contextmanager
def noted_steps(job: Job) -> Iterator[Steps]:
    """Note the steps of managers that run in this context."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import RequestState

    steps = Steps()
    body = ContinuousBatchingManager._generation_loop_body
    again = RequestState.create_equivalent_initial_request

    def timed(manager: Any, processor: Any, bootstrapping: bool) -> bool:
        begin = _now(job)
        go_on: bool = body(manager, processor, bootstrapping)
        steps.ends.append((time.perf_counter(), compile_seconds()))
        io, blocks = processor.inputs_and_outputs, processor.cache.cache_allocators.values()
        steps.nbytes = sum(x.num_blocks * x.bytes_per_block for x in blocks)
        if go_on and io.num_q_tokens == len(io.requests_in_batch):
            wall, processor_s = _since(begin, job)
            steps.tokens += io.num_q_tokens
            steps.wall += wall
            steps.processor += processor_s
        return go_on

    def preempted(state: Any) -> Any:
        steps.preemptions += 1
        new = again(state)
        new._timestamps = state._timestamps  # with that of the first token
        return new

    with (
        patch.object(ContinuousBatchingManager, "_generation_loop_body", timed),
        patch.object(RequestState, "create_equivalent_initial_request", preempted),
    ):
        yield steps
