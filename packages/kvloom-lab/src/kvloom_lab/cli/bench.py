"""`kvloom bench`: speed compared with torch and transformers, in one run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.errors import InputError

from .options import (
    RECIPES_HELP,
    ChosenModel,
    Dtype,
    Json,
    Model,
    option,
    parse_numbers,
    parse_recipes,
    silence_transformers,
)
from .outputs import check_outputs, collect_rows, finish, show_results
from .progress import show_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from ..bench.timing import Candidate

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure speed compared with torch and transformers, alternately in one run.

    Keys, values and weights are random. Times are medians and exclude compilation.

    Progress and finished rows are printed on stderr, the table on stdout. After Ctrl-C, the table
    shows the finished contexts. The exit status is 1 if a recipe has no times.
    """


_CONTEXT = Annotated[str, option("Tokens, one number or several: 8192,32768.")]
_RECIPES = Annotated[str, option(f"{RECIPES_HELP} (see kvloom recipes).")]
_HEADS = Annotated[str, option("Query heads / key-value heads.")]
_HEAD_DIM = Annotated[int, option("Channels of a head.")]
_BATCH = Annotated[int, option("Rows of the batch.")]
_DTYPE = Annotated[str, option("bfloat16, float16 or float32.")]
_THREADS = Annotated[
    int | None,
    option("Threads of torch and of kernels; default: torch's choice.", min=1),
]
_REPEATS = Annotated[int, option("Timed calls of each candidate.", min=1)]
_PLOT = Annotated[Path | None, option("Plot the times.", metavar="FILE")]
_BASELINES_HELP = "all that take at most a minute, none, or some of {}."


@app.command("decode")
def decode(
    context: _CONTEXT = "8192,32768",
    recipes: _RECIPES = "full,near-lossless,kivi,kivi-4,skvq,skvq-k2v1.5,rtn:bits=4,h2o,clusterkv",
    baselines: Annotated[
        str, option(_BASELINES_HELP.format("sdpa, dynamic, quanto, hqq, fp8"))
    ] = "all",
    heads: _HEADS = "32/8",
    head_dim: _HEAD_DIM = 128,
    batch: _BATCH = 1,
    dtype: _DTYPE = "bfloat16",
    threads: _THREADS = None,
    repeats: _REPEATS = 30,
    json: Json = None,
    plot: _PLOT = None,
) -> None:
    """One layer's decode step: the attention of one query to a long context.

    Storing the step's token is included. Baselines: torch's SDPA (rows: with the query heads of a
    group as query rows over the same keys, which torch does not do by itself) and transformers'
    caches. The context is not computed: caches are filled with random keys and values.
    """
    from ..bench import LayerShape
    from ..bench.candidates import DECODE_BASELINES, DECODE_REFERENCES, decode_candidates

    shape = LayerShape(*_parse_heads(heads), head_dim, batch, _parse_dtype(dtype))
    compared, limit_s = _parse_baselines(baselines, DECODE_BASELINES)
    _run(
        "decode", shape, context, recipes, threads, repeats, json, plot,
        lambda names, tokens: decode_candidates(shape, names, tokens, compared, limit_s),
        DECODE_REFERENCES,
        "ms: median of a step; KV: size of the cache with metadata; GB/s: keys and values that "
        "a step has to read, over its time.",
    )  # fmt: skip


def _add_prompt_command(name: str, context: str, recipes: str, *, about: str, caption: str) -> None:
    """Add a command that measures a part of a layer's work on a prompt."""

    @app.command(name, help=about)
    def command(
        context: _CONTEXT = context,
        recipes: _RECIPES = recipes,
        heads: _HEADS = "32/8",
        head_dim: _HEAD_DIM = 128,
        batch: _BATCH = 1,
        dtype: _DTYPE = "bfloat16",
        threads: _THREADS = None,
        repeats: _REPEATS = 5,
        json: Json = None,
        plot: _PLOT = None,
    ) -> None:
        from ..bench import LayerShape
        from ..bench.candidates import PROMPT_REFERENCES, prompt_candidates

        shape = LayerShape(*_parse_heads(heads), head_dim, batch, _parse_dtype(dtype))
        _run(
            name, shape, context, recipes, threads, repeats, json, plot,
            partial(prompt_candidates, name, shape), PROMPT_REFERENCES, caption,
        )  # fmt: skip


_add_prompt_command(
    "prefill",
    "2048",
    "full,kivi,skvq,h2o,snapkv,minikv,clusterkv",
    about="""A prompt's attention in one layer, with scoring, eviction, packing and indexing.

    "storing" is the work after the attention, timed alone.
    """,
    caption="ms: median of a prompt in one layer; KV: size of the cache after it.",
)
_add_prompt_command(
    "pack",
    "8192",
    "kivi,kivi-4,skvq,skvq-k2v1.5,rtn:bits=4,turbo",
    about="The quantization of a prompt's keys and values, compared with the prompt's attention.",
    caption="ms: median of packing a prompt of one layer; GB/s: exact keys and values.",
)


@app.command("generate")
def generate(
    context: _CONTEXT = "512,8192",
    recipes: _RECIPES = "full,near-lossless,kivi,kivi-4,h2o,clusterkv",
    baselines: Annotated[str, option(_BASELINES_HELP.format("dynamic, quanto, hqq, fp8"))] = "all",
    heads: _HEADS = "32/8",
    head_dim: _HEAD_DIM = 64,
    layers: Annotated[int, option("Layers of the model.")] = 8,
    hidden: Annotated[int, option("Hidden size of the model.")] = 2048,
    intermediate: Annotated[int, option("Width of the model's MLP.")] = 8192,
    vocabulary: Annotated[int, option("Tokens in the vocabulary.")] = 32000,
    batch: _BATCH = 1,
    dtype: _DTYPE = "bfloat16",
    threads: _THREADS = None,
    repeats: _REPEATS = 15,
    json: Json = None,
    plot: _PLOT = None,
) -> None:
    """Whole decode steps of a Llama with random weights, compared with transformers' caches.

    The prompt is not computed: every cache is filled to the context with random keys and values.
    kvloom's caches are filled as after a prompt, with scores from the last 64 queries.
    """
    from ..bench import ModelShape
    from ..bench.candidates import GENERATE_BASELINES, GENERATE_REFERENCES, generate_candidates
    from ..models import random_llama

    shape = ModelShape(
        *_parse_heads(heads), head_dim, batch, _parse_dtype(dtype), layers, hidden,
        intermediate, vocabulary,
    )  # fmt: skip
    compared, limit_s = _parse_baselines(baselines, GENERATE_BASELINES)
    model: Any = None

    def candidates(names: Sequence[str], tokens: int) -> list[Candidate]:
        nonlocal model
        model = model or random_llama(shape, max(parse_numbers(context, int, "--context")))
        return generate_candidates(model, shape, names, tokens, compared, limit_s)

    _run(
        "generate", shape, context, recipes, threads, repeats, json, plot,
        candidates, GENERATE_REFERENCES,
        "ms: median of a step; KV: size of the cache in all layers, with metadata; GB/s: "
        "weights, keys and values that a step has to read, over its time.",
    )  # fmt: skip


@app.command("throughput")
def throughput(
    memory: Annotated[str, option("Bytes of all requests' caches, such as 304MiB.")],
    prompt: Annotated[
        str, option("Tokens of a prompt: 1024,2048; 160+338 also gives the new tokens.")
    ] = "1024",
    max_new_tokens: Annotated[int, option("Tokens that a request generates.", min=2)] = 256,
    recipes: _RECIPES = "full,near-lossless,balanced,small,tiny",
    baselines: Annotated[
        str, option("all, none, or some of dynamic, quanto, hqq, fp8, kvpress, continuous.")
    ] = "all",
    model: Model = "reference",
    dtype: Dtype = "auto",
    threads: _THREADS = None,
    rounds: Annotated[int, option("Runs of each row, in turns.", min=1)] = 3,
    json: Json = None,
    plot: Annotated[Path | None, option("Plot tokens per second.", metavar="FILE")] = None,
) -> None:
    """Output tokens per second of as many requests as fit into equal memory.

    Each row runs in a process of its own, in turns. Requests are parts of CPython's library. A
    static batch decodes them together. Rows of continuous batching are of transformers' own pages,
    and of recipes that pages hold, in blocks of as many bytes. KL is the divergence from exact
    attention on that text; rows up to 0.02 are of equal quality.
    """
    import torch

    from kvloom.units import parse_bytes

    from ..bench.serving import Job
    from ..bench.tables import throughput_line, throughput_table
    from ..bench.throughput import BASELINES, jobs, make_rows, measure, requests_of
    from ..models import device
    from ..show.plots import throughput_plot
    from ..workload.machine import machine

    nbytes, chosen = parse_bytes(memory), parse_recipes(recipes)
    compared, _ = _parse_baselines(baselines, BASELINES)
    sizes = _parse_requests(prompt, max_new_tokens)
    check_outputs(json, plot=plot)
    of_model = ChosenModel(model, dtype)
    with show_progress() as progress:
        progress("planning")
        requests = requests_of(of_model.config, of_model.tokenizer, dtype, nbytes, sizes)
        jobs_and_rows = [row for request in requests for row in jobs(request, chosen, compared)]
        to_run = [row for row in jobs_and_rows if isinstance(row, Job)]
        on_step = progress.counter((rounds + 1) * len(to_run))
        settings = model, dtype, threads or torch.get_num_threads()

        runs = measure(to_run, settings, rounds, on_step)
        measured, early_end = collect_rows(runs, lambda run: progress.line(throughput_line(run)))
    rows = make_rows(jobs_and_rows, measured)
    environment = {
        **machine(torch.empty(0, dtype=requests[0].facts.geometry.dtype, device=device())),
        "threads": settings[-1],
        "verb": "throughput",
        "model": of_model.name,
        "memory": nbytes,
        "rounds": rounds,
    }
    done = Counter(str(job) for job, _ in measured)
    missing = [
        f"{job} after round {done[str(job)]}" if done[str(job)] else str(job)
        for job in to_run
        if early_end is not None and done[str(job)] < rounds
    ]
    if missing:
        environment["missing"] = missing
    if plot and measured:
        throughput_plot(rows, environment).savefig(plot)
    if measured or not to_run:
        data = {"environment": environment, "rows": [asdict(row) for row in rows]}
        show_results(data, json, throughput_table(rows, environment))
    names = {recipe.name for recipe in chosen}
    failed = [row.name for row in rows if row.problem and row.name in names]
    finish(early_end, missing, list(dict.fromkeys(failed)))


def _parse_requests(option: str, new: int) -> list[tuple[int, int]]:
    """Read "1024,160+338": tokens of prompts, and of answers where they are given."""
    sizes = []
    for part in option.split(","):
        numbers = part.strip().split("+")
        if len(numbers) > 2 or not all(x.isdecimal() and int(x) for x in numbers):
            raise InputError(
                f"--prompt {option!r} is not a list of whole numbers above 0; give some such as "
                "1024,160+338"
            )
        sizes.append((int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else new))
    if any(new < 2 for _, new in sizes):
        raise InputError(f"--prompt {option!r} has answers of 1 token; give 2 or more")
    return list(dict.fromkeys(sizes))


def _run(
    name: str,
    shape: Any,
    context: str,
    recipes: str,
    threads: int | None,
    repeats: int,
    json: str | None,
    plot: Path | None,
    candidates: Callable[[Sequence[str], int], list[Candidate]],
    references: Sequence[str],
    caption: str,
) -> None:
    """Measure at every context and show the result.

    name: of the command. candidates: returns the candidates of recipes at one context.
    references: the names of rows by whose time the times of others are divided.
    """
    import torch

    from kvloom.kernels import companion, compile_seconds

    from ..bench import transformers_caches
    from ..bench.tables import bench_line, bench_table
    from ..bench.timing import WARM_UP, TimedRow, make_rows, time_candidates
    from ..show.plots import bench_plot
    from ..workload import clock
    from ..workload.machine import machine

    contexts = parse_numbers(context, int, "--context")
    names = list(dict.fromkeys(recipe.name for recipe in parse_recipes(recipes)))
    check_outputs(json, plot=plot)
    silence_transformers()
    if threads is not None:
        torch.set_num_threads(threads)
    companion.disable()
    compiled_before = compile_seconds()
    limits = {"read_gb_s": clock.read_bandwidth_gb_s()}
    with show_progress() as progress:
        on_step = progress.counter(len(contexts) * (WARM_UP + repeats))

        def measure() -> Iterator[TimedRow]:
            for tokens in contexts:
                on_step(f"filling caches with {tokens:,} tokens", 0)
                measured = candidates(names, tokens)
                time_candidates(measured, repeats, on_step)
                yield from make_rows(
                    measured, references, shape=str(shape), context=tokens, batch=shape.batch
                )

        measured_rows, early_end = collect_rows(
            measure(), lambda row: progress.line(bench_line(row))
        )
    environment = {
        **machine(torch.empty(0, dtype=shape.dtype)),
        "verb": name,
        "shape": str(shape),
        "batch": shape.batch,
        "repeats": repeats,
        "compile_s": compile_seconds() - compiled_before,
    }
    finished = {row.context for row in measured_rows}
    missing = [f"{tokens:,} tokens" for tokens in contexts if tokens not in finished]
    if missing:
        environment["missing"] = missing
    if plot and measured_rows:
        bench_plot(measured_rows, environment).savefig(plot)
    if measured_rows:
        shares = name in ("prefill", "pack")
        table = bench_table(measured_rows, environment, limits, caption, shares)
        rows = [asdict(row) for row in measured_rows]
        data = {"environment": environment, "limits": limits, "rows": rows}
        show_results(data, json, table)
    failed = [
        r.name for r in measured_rows if r.problem and r.name not in transformers_caches.INSTALL
    ]
    finish(early_end, missing, list(dict.fromkeys(failed)))


def _parse_baselines(option: str, baselines: Sequence[str]) -> tuple[Sequence[str], float | None]:
    """Return the baselines of "all", "none" or names, and the most seconds that each may take.

    A baseline that was named has no limit.
    """
    from ..bench import transformers_caches

    if option == "all":
        return baselines, transformers_caches.LIMIT_S
    if option == "none":
        return (), None
    names = [name.strip() for name in option.split(",")]
    if not set(names) <= set(baselines):
        raise InputError(
            f"--baselines {option!r} is not all, none or some of {', '.join(baselines)}; choose "
            "of them"
        )
    return names, None


def _parse_heads(option: str) -> tuple[int, int]:
    """Read "32/8" (query heads, key/value heads), or "8" (as many of both)."""
    parts = option.split("/")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--heads {option!r} is not query heads/key-value heads, such as 32/8")
    return int(parts[0]), int(parts[-1])


def _parse_dtype(option: str) -> torch.dtype:
    from ..workload.layers import DTYPES

    if option not in DTYPES:
        raise InputError(f"--dtype {option!r} is unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[option]
