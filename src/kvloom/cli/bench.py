"""`kvloom bench`: speed beside torch and transformers, in one run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .collect import collect, leave
from .edge import RECIPES, Json, chosen, quiet, show, told, writable
from .progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..bench.clock import Side

app = typer.Typer(no_args_is_help=True, help="Measure speed beside torch and transformers.")


@app.callback()
def _bench() -> None:
    """Measure speed beside torch and transformers, all in turns in one run.

    Keys, values and weights are random. Times are medians; compiling is not in them.

    Progress and finished rows go to stderr, the table to stdout. After Ctrl-C, the table shows the
    contexts that are finished. The exit status is 1 if a recipe has no times.
    """


_CONTEXT = Annotated[str, typer.Option(help="Tokens, one count or several: 8192,32768.")]
_RECIPES = Annotated[str, typer.Option(help=f"{RECIPES} (see kvloom recipes).")]
_HEADS = Annotated[str, typer.Option(help="Query heads / key-value heads.")]
_HEAD_DIM = Annotated[int, typer.Option(help="Numbers of a key of one head.")]
_BATCH = Annotated[int, typer.Option(help="Rows side by side.")]
_DTYPE = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
_THREADS = Annotated[
    int | None, typer.Option(help="Threads of torch and of kernels; default: torch's choice.")
]
_REPEATS = Annotated[int, typer.Option(help="Timed calls of each side.")]
_PLOT = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the times.")]


def _layer(
    verb: str, context: str, recipes: str, repeats: int, *, about: str, caption: str
) -> None:
    """Add a verb that measures a part of one layer's work, as the module `bench.<verb>` has it."""

    @app.command(verb, help=about)
    def command(
        context: _CONTEXT = context,
        recipes: _RECIPES = recipes,
        heads: _HEADS = "32/8",
        head_dim: _HEAD_DIM = 128,
        batch: _BATCH = 1,
        dtype: _DTYPE = "bfloat16",
        threads: _THREADS = None,
        repeats: _REPEATS = repeats,
        json: Json = None,
        plot: _PLOT = None,
    ) -> None:
        with told():
            from ..bench import Shape, shape

            work = import_module(f"kvloom.bench.{verb}")
            built = Shape(*shape.heads(heads), head_dim, batch, shape.dtype(dtype))
            _run(
                verb, built, context, recipes, threads, repeats, json, plot,
                lambda names, tokens: work.sides(built, names, tokens), work.AGAINST, caption,
            )  # fmt: skip


_layer(
    "decode",
    "8192,32768",
    "full,kivi,kivi-4,skvq,skvq-k2v1.5,rtn:bits=4,h2o,clusterkv",
    30,
    about="""One layer's decode step: one query to a long context, its token taken in.

    Beside torch's SDPA (rows: query heads of a group as rows over the same keys, which torch does
    not do by itself) and transformers' caches. The context is not computed: caches are filled with
    random keys and values.
    """,
    caption="ms: median of a step; KV: held, metadata included; GB/s: keys and values that a step "
    "has to read, over its time.",
)
_layer(
    "prefill",
    "2048",
    "full,kivi,skvq,h2o,snapkv,minikv,clusterkv",
    5,
    about="""A prompt's attention in one layer, with scoring, dropping, packing and indexing.

    "taking in" is what comes after the attention, timed alone.
    """,
    caption="ms: median of a prompt in one layer; KV: held after it.",
)
_layer(
    "pack",
    "8192",
    "kivi,kivi-4,skvq,skvq-k2v1.5,rtn:bits=4,turbo",
    5,
    about="A prompt's keys and values into their formats, beside the prompt's attention.",
    caption="ms: median of packing a prompt of one layer; GB/s: keys and values that go in.",
)


@app.command("generate")
def generate(
    context: _CONTEXT = "512,8192",
    recipes: _RECIPES = "full,kivi,kivi-4,h2o,clusterkv",
    heads: _HEADS = "32/8",
    head_dim: _HEAD_DIM = 64,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    hidden: Annotated[int, typer.Option(help="Its hidden size.")] = 2048,
    intermediate: Annotated[int, typer.Option(help="Width of its MLP.")] = 8192,
    vocabulary: Annotated[int, typer.Option(help="Tokens that it knows.")] = 32000,
    batch: _BATCH = 1,
    dtype: _DTYPE = "bfloat16",
    threads: _THREADS = None,
    repeats: _REPEATS = 15,
    json: Json = None,
    plot: _PLOT = None,
) -> None:
    """Whole decode steps of a Llama with random weights, beside transformers' caches.

    The prompt is not computed: every cache is filled to the context with random keys and values,
    kvloom's as after a prompt of which the last 64 queries scored.
    """
    with told():
        from ..bench import ModelShape, shape
        from ..bench import generate as work

        built = ModelShape(
            *shape.heads(heads), head_dim, batch, shape.dtype(dtype), layers, hidden,
            intermediate, vocabulary,
        )  # fmt: skip
        model: Any = None

        def sides(names: Sequence[str], tokens: int) -> list[Side]:
            nonlocal model
            model = model or work.model(built, max(shape.contexts(context)))
            return work.sides(model, built, names, tokens)

        _run(
            "generate", built, context, recipes, threads, repeats, json, plot,
            sides, work.AGAINST,
            "ms: median of a step; KV: held in all layers, metadata included; GB/s: weights, keys "
            "and values that a step has to read, over its time.",
        )  # fmt: skip


def _run(
    verb: str,
    shape: Any,
    context: str,
    recipes: str,
    threads: int | None,
    repeats: int,
    json: str | None,
    plot: Path | None,
    sides: Callable[[Sequence[str], int], list[Side]],
    against: Sequence[str],
    about: str,
) -> None:
    """Measure at every context and show it; sides: of recipes at one."""
    import torch

    from ..bench import caches, clock, limits, report, rows
    from ..bench.plot import plot as draw
    from ..bench.shape import contexts
    from ..errors import InputError
    from ..kernels.dispatch import compile_seconds
    from ..report.machine import machine

    counts = contexts(context)
    names = list(dict.fromkeys(recipe.name for recipe in chosen(recipes)))
    for option, value in (("--threads", threads), ("--repeats", repeats)):
        if value is not None and value < 1:
            raise InputError(f"{option} {value} must be 1 or more")
    writable(json, plot=plot)
    quiet()
    if threads is not None:
        torch.set_num_threads(threads)
    begin = compile_seconds()
    most = {"read_gb_s": limits.read_gb_s()}
    with progress() as shown:
        tell = shown.counter(len(counts) * clock.rounds(repeats))

        def measured() -> Iterator[rows.Row]:
            for tokens in counts:
                tell(f"filling caches with {tokens:,} tokens", 0)
                built = sides(names, tokens)
                times = clock.run(built, repeats, tell)
                yield from rows.of(
                    built, times, against, shape=str(shape), context=tokens, batch=shape.batch
                )

        found, ended = collect(measured(), report.line, shown)
    environment = {
        **machine(torch.empty(0, dtype=shape.dtype)),
        "verb": verb,
        "shape": str(shape),
        "batch": shape.batch,
        "repeats": repeats,
        "compile_s": compile_seconds() - begin,
    }
    missing = [
        f"{tokens:,} tokens" for tokens in counts if tokens not in {r.context for r in found}
    ]
    if missing:
        environment["missing"] = missing
    if plot and found:
        draw(found, environment, plot)
    if found:
        table = report.table(found, environment, most, about, verb in ("prefill", "pack"))
        show(rows.to_json(found, environment, most), json, table)
    failed = [row.name for row in found if row.problem and row.name not in caches.STOCK]
    leave(ended, missing, list(dict.fromkeys(failed)))
