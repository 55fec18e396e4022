"""The tables of all commands, which stay readable at any terminal width; rich can print them.

If a table is wider than the terminal, the columns are split into blocks, which are printed one
below the other, each with the row names as its first column. No figure is cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..analyse.attention import LayerAttention
    from ..analyse.distribution import Distribution
    from ..analyse.error import LayerError
    from ..analyse.modes import ModeCheck
    from ..bench.throughput import Measured, ThroughputRow
    from ..bench.timing import TimedRow
    from ..eval.comparison import Row
    from ..eval.summary import Figures
    from ..papers.claim import ClaimTable, Verdict
    from ..planner.plan_recipes import Plan, PlanRow
    from ..tuner.run import Tuning

_NAME_WIDTH = 24  # characters of a row name that are kept on one line


class FigureTable:
    """A table of figures that rich can print."""

    def __init__(self, title: str, first: str, columns: Sequence[str], *, numbers: bool = False):
        """Create an empty table.

        first: heading of the row names. numbers: whether the row names are numbers, which are
        right-aligned.
        """
        self.title, self.first, self.columns, self.numbers = title, first, columns, numbers
        self.rows: list[tuple[Text, tuple[str, ...]] | None] = []

    def add(self, name: str, *cells: str) -> None:
        """Add a row; columns without a cell stay empty."""
        self.rows.append((Text(name), cells))

    def section(self, heading: str) -> None:
        """Start a new section of rows under a heading."""
        self.rows += [None, (Text(heading, "bold"), ())]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        """Yield the title and the fewest blocks that fit the width."""
        yield Text(self.title, "italic")
        block: list[int] = []
        width = options.max_width
        longest = max((cell_len(str(row[0])) for row in self.rows if row), default=0)
        # Long names are wrapped before the columns are split into more blocks.
        names = min(longest, _NAME_WIDTH, width // 3)
        unlimited = options.update(max_width=10_000)
        for column in range(len(self.columns)):
            candidate = self._table([*block, column], names, names)
            if block and Measurement.get(console, unlimited, candidate).maximum > width:
                yield self._table(block, names)
                block = []
            block.append(column)
        yield self._table(block, names)

    def _table(self, block: list[int], min_width: int, max_width: int | None = None) -> Table:
        """Return the columns of a block as a table; min_width, max_width: of the row names."""
        table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        justify: JustifyMethod = "right" if self.numbers else "left"
        table.add_column(
            self.first, justify=justify, overflow="fold", min_width=min_width, max_width=max_width
        )
        no_wrap = len(block) > 1  # a single column that is too wide wraps its lines
        for column in block:
            table.add_column(
                self.columns[column], justify="right", overflow="fold", no_wrap=no_wrap,
                vertical="bottom",
            )  # fmt: skip
        for row in self.rows:
            if row is None:
                table.add_section()
            else:
                name, cells = row
                table.add_row(name, *(cells[i] if i < len(cells) else "" for i in block))
        return table


def results_table(
    lines: Iterable[Mapping[str, Any]], prompts: Iterable[Mapping[str, Any]] = ()
) -> Group:
    """Return a table for each task; rich can print it.

    lines: of `TASK.jsonl`. prompts: of `prompts.jsonl`. A task whose contexts differ in length has
    a table of each length.
    """
    from ..eval.summary import PER_SAMPLE, main_score, summarize

    lengths = {(x["task"], x["sample"]): x["length"] for x in prompts if "length" in x}
    different = {(task, length) for (task, _), length in lengths.items()}
    by_length = Counter(task for task, _ in different)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        title, length = line["task"], lengths.get((line["task"], line["sample"]))
        if length is not None and by_length[title] > 1:
            title += f", context {length:,}"
        groups.setdefault(title, []).append(line)
    parts: list[Any] = []
    for title, group in groups.items():
        rows = summarize(group)
        names = list(dict.fromkeys(name for row in rows for name in row.scores))
        headings = (name.replace("_", "\n") for name in names)
        columns = ["share of\nbytes", "KV\nMiB", *headings, "samples", "against\nfull"]
        table = FigureTable(title, "recipe", columns)
        for row in rows:
            if row.scores:
                means = {name: f"{interval.mean:.4g}" for name, interval in row.scores.items()}
                cells = [means.get(name, "–") for name in names]
                size = f"{(row.kv_bytes or 0) / 2**20:,.2f}"
                score = main_score(row.task, names)
                main = row.over_full.get(PER_SAMPLE.get(score, score))
                verdict = "–" if main is None else f"{main.verdict} +{main.won} −{main.lost}"
                table.add(row.recipe, f"{row.share:.1%}", size, *cells, str(row.samples), verdict)
        parts += [table, *_tokens_read(rows)]
        parts += [
            Text(f"{row.recipe}: {row.problem} ({row.problems} samples)", "yellow")
            for row in rows
            if row.problem
        ]
    caption = (
        "Means; the 95% intervals are on the page of kvloom report. Against full: whether the "
        "first score differs by more than chance, and the samples that are +better and −worse."
    )
    parts.append(Text(caption, "dim"))
    return Group(*parts)


def _tokens_read(rows: Sequence[Row | Figures]) -> list[Text]:
    """Return a line with the tokens that recipes with recall read, if there are any."""
    reads = [f"{r.recipe} {r.tokens_read:,.0f}" for r in rows if r.tokens_read is not None]
    return [Text("tokens read per step and layer: " + ", ".join(reads))] if reads else []


_COMPARISON_COLUMNS = (
    "bits per\nvalue", "KV\nMiB", "times\nsmaller", "prefill\ns", "decode\ntok/s", "perplexity",
    "agrees", "needles\ncorrect",
)  # fmt: skip


def comparison_table(rows: Sequence[Row], environment: dict[str, Any]) -> Group:
    """Return a table of the rows with a caption on how they were measured; rich can print it."""
    title = f"{environment['model']} ({environment['dtype']}), {_device_text(environment)}"
    table = FigureTable(title, "recipe", _COMPARISON_COLUMNS)
    for row in rows:
        table.add(row.recipe, *_comparison_cells(row, environment["questions"]))
    problems = [Text(_comparison_problem(r), "yellow") for r in rows if r.problem]
    recalled = _tokens_read(rows)
    moved = [
        f"{r.recipe} {r.moved_bytes / 2**20:,.2f} MiB "
        f"({r.ready:.0%} of its tokens were on the device)"
        for r in rows
        if r.moved_bytes is not None and r.ready is not None
    ]
    if moved:
        recalled.append(Text("copied from a tier per step, all rows: " + ", ".join(moved)))
    budget = [Text(_budget(environment), "dim")] if "budget" in environment else []
    missing = []
    if "missing" in environment:
        missing = [Text(f"not measured: {', '.join(environment['missing'])}", "yellow")]
    caption = Text(_comparison_caption(environment), "dim")
    return Group(table, *recalled, *problems, *missing, *budget, caption)


def comparison_line(row: Row, environment: dict[str, Any]) -> str:
    """Return the figures of a row in one line."""
    if row.problem is not None:
        return _comparison_problem(row)
    bits, _, smaller, prefill, speed, perplexity, agrees, needles = _comparison_cells(
        row, environment["questions"]
    )
    return (
        f"{row.recipe}: {bits} bits per value, {smaller} smaller, prefill {prefill} s, "
        f"{speed} tok/s, perplexity {perplexity}, agrees {agrees}"
        + (f", needles {needles}" if row.needle is not None else "")
    )


def _comparison_problem(row: Row) -> str:
    return f"{row.recipe} {'failed' if row.failed else 'cannot run'}: {row.problem}"


def _comparison_cells(row: Row, questions: int) -> list[str]:
    if row.problem is not None:
        return ["–"] * len(_COMPARISON_COLUMNS)
    assert row.kv_bytes is not None
    needles = "–" if row.needle is None else f"{round(row.needle * questions)}/{questions}"
    return [
        "–" if row.bits_per_value is None else f"{row.bits_per_value:.2f}",
        f"{row.kv_bytes / 2**20:,.2f}",
        f"{row.times_smaller:.1f}x",
        f"{row.prefill_s:.2f}",
        f"{row.decode_tokens_s:,.1f}",
        f"{row.perplexity:,.3f}" if (row.perplexity or 0) < 1000 else f"{row.perplexity:,.0f}",
        f"{row.agreement:.1%}",
        needles,
    ]


def _comparison_caption(environment: dict[str, Any]) -> str:
    rows = "1 row" if environment["batch"] == 1 else f"{environment['batch']} rows"
    return (
        f"{rows} of {environment['context']:,} tokens of {environment['text'] or 'text'}, then "
        f"{environment['new_tokens']} tokens one by one. bits, MiB: at the end, with exact "
        "windows, metadata and spare room; tok/s: all rows together; agrees: the likeliest next "
        "token is that of full."
    )


def _budget(environment: dict[str, Any]) -> str:
    budget, without = environment["budget"], environment["without_budget"]
    tokens = f"{budget:,} tokens" if isinstance(budget, int) else f"{budget:.4g} of the context"
    return (
        f"budget: {tokens}, to keep, or to read per step for recipes with recall; "
        f"without a budget: {', '.join(without)}."
    )


def _device_text(environment: dict[str, Any]) -> str:
    threads = "1 thread" if environment["threads"] == 1 else f"{environment['threads']} threads"
    return environment["gpu"] or f"{environment['cpu']}, {threads}"


def bench_table(
    rows: Sequence[TimedRow],
    environment: dict[str, Any],
    limits: dict[str, Any],
    caption: str,
    shares: bool = False,
) -> Group:
    """Return a table of the rows, by context; rich can print it.

    shares: show the share of a reference's time that a row takes, instead of how many times faster
    the row is.
    """
    bandwidth = limits["read_gb_s"]
    references = list(dict.fromkeys(name for row in rows for name in row.ratios))
    title = (
        f"{environment['shape']}, {environment['dtype']}, batch {environment['batch']}; "
        f"{_device_text(environment)}"
    )
    speeds = any(row.gb_s is not None for row in rows)
    names = ["ms", *(_heading(name, shares) for name in references), "KV\nMiB"]
    table = FigureTable(title, "", names + ["GB/s", "of the\nlimit"] * speeds)
    for context in dict.fromkeys(row.context for row in rows):
        table.section(f"{context:,} tokens")
        for row in (row for row in rows if row.context == context):
            mark = "*" if row.fell else ""
            table.add(row.name + mark, *_bench_cells(row, references, shares, speeds, bandwidth))
    notes = [Text(f"{r.name}: {r.problem}", "yellow") for r in _once(rows) if r.problem]
    fallbacks = [f"* {r.name}: plain torch runs {'; '.join(r.fell)}" for r in _once(rows) if r.fell]
    notes += [Text(fallback, "yellow") for fallback in fallbacks]
    compiled = f" Compiling kernels took {environment['compile_s']:.1f} s, not timed."
    limit = f" The machine reads at most {bandwidth:.1f} GB/s." if speeds else ""
    if "missing" in environment:
        notes.append(Text(f"not measured: {', '.join(environment['missing'])}", "yellow"))
    caption += limit + compiled * (environment["compile_s"] >= 0.05)
    return Group(table, *notes, Text(caption, "dim"))


def bench_line(row: TimedRow) -> str:
    """Return the time of a row and its bytes in one line."""
    name = f"{row.context:,} tokens, {row.name}: "
    if row.ms is None:
        return name + (row.problem or "no times")
    size = "" if row.kv_bytes is None else f", {row.kv_bytes / 2**20:,.1f} MiB"
    return f"{name}{row.ms:,.2f} ms{size}"


def _bench_cells(
    row: TimedRow, references: Sequence[str], shares: bool, speeds: bool, bandwidth: float
) -> list[str]:
    if row.ms is None:
        return ["–"]
    ratios = (
        "–" if name not in row.ratios else _ratio(row.ratios[name], shares) for name in references
    )
    size = "–" if row.kv_bytes is None else f"{row.kv_bytes / 2**20:,.1f}"
    cells = [f"{row.ms:,.2f}", *ratios, size]
    if speeds:
        cells += (
            ["–", "–"] if row.gb_s is None else [f"{row.gb_s:.1f}", f"{row.gb_s / bandwidth:.0%}"]
        )
    return cells


def _once(rows: Sequence[TimedRow]) -> list[TimedRow]:
    """Return the last row of each name."""
    return list({row.name: row for row in rows}.values())


def _ratio(ratio: float, share: bool) -> str:
    return f"{1 / ratio:.1%}" if share else f"{ratio:.2f}x"


def _heading(name: str, shares: bool) -> str:
    """Return the heading of a reference's column, with a long name on two lines."""
    head, _, rest = name.rpartition(" ")
    name = f"{head}\n{rest}" if head else name
    return f"it /\n{name}" if shares else f"{name}\n/ it"


_THROUGHPUT_COLUMNS = (
    "requests", "KV\nMiB", "MiB of\none", "planned", "peak\nMiB", "tok/s", "tok/s,\nrange",
    "tok/s,\nprocessor", "DynamicCache\n/ it", "tok/s with\nprompts", "first\ntoken, s",
    "pre-\nempted", "KL",
)  # fmt: skip


def throughput_table(rows: Sequence[ThroughputRow], environment: dict[str, Any]) -> Group:
    """Return a table of the rows, by size of requests; rich can print it."""
    from ..planner.units import show_bytes

    memory, rounds = show_bytes(environment["memory"]), max(row.rounds for row in rows)
    title = (
        f"{environment['model']} ({environment['dtype']}), {memory} of caches; "
        f"{_device_text(environment)}"
    )
    table = FigureTable(title, "", _THROUGHPUT_COLUMNS)
    for size in dict.fromkeys((row.prompt, row.new) for row in rows):
        table.section(f"{size[0]:,} tokens and {size[1]:,} new")
        for row in (row for row in rows if (row.prompt, row.new) == size):
            table.add(row.name, *_throughput_cells(row))
    named = {(row.name, row.problem): row for row in rows if row.problem}
    notes = [Text(f"{name}: {problem}", "yellow") for name, problem in named]
    notes += [
        Text(f"{row.name}: {show_bytes(row.kv_bytes)}, above the memory that was given", "yellow")
        for row in rows
        if row.kv_bytes and row.kv_bytes > environment["memory"]
    ]
    if "missing" in environment:
        notes.append(Text(f"not measured: {', '.join(environment['missing'])}", "yellow"))
    caption = (
        f"Medians of up to {rounds} rounds. tok/s: output tokens while all requests decode; "
        "processor: the same per second of processor time, which DynamicCache / it compares; with "
        "prompts: per second of processor time, everything included. peak: the most memory of the "
        "process above the model's. KL: nats from exact attention."
    )
    return Group(table, *notes, Text(caption, "dim"))


def _throughput_cells(row: ThroughputRow) -> list[str]:
    requests = "–" if row.batch is None else f"{row.batch:,}"
    if row.tokens_s is None or row.processor_tokens_s is None:
        return [requests]
    whole = row.whole_processor_tokens_s
    assert whole and row.kv_bytes and row.predicted_bytes and row.batch  # noqa: PT018
    return [
        requests,
        f"{row.kv_bytes / 2**20:,.1f}",
        f"{row.kv_bytes / row.batch / 2**20:,.2f}",
        f"{row.predicted_bytes / 2**20:,.2f}",
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}",
        f"{row.tokens_s.best:,.1f}",
        f"{row.tokens_s.low:,.0f}–{row.tokens_s.high:,.0f}",
        f"{row.processor_tokens_s.best:,.1f}",
        "–" if row.times_dynamic is None else f"{row.times_dynamic:.2f}x",
        f"{whole.best:,.1f}",
        f"{row.first_token_s:,.1f}",
        "" if row.preemptions is None else str(row.preemptions),
        "–" if row.kl is None else f"{row.kl:.2g}",
    ]


def throughput_line(measured: Measured) -> str:
    """Return a run in one line."""
    job, run = measured
    if isinstance(run, str):
        return f"{job}: {run}"
    wall, processor = (run.decoded / s if s > 0 else 0 for s in run.decode_s)
    return (
        f"{job}: {run.batch} requests, {wall:,.1f} tok/s, {processor:,.1f} per processor second, "
        f"{run.kv_bytes / 2**20:,.1f} MiB"
    )


def plan_table(plan: Plan) -> Group:
    """Return a table of the recipes, and notes that explain it; rich can print it."""
    unit, name = _unit(plan)
    columns = [f"KV,\n{name}", f"peak,\n{name}"]
    if plan.memory is not None:
        columns += ["fits", "longest\ncontext", "longest,\nchunked", "largest\nbatch"]
    timed = any(row.step_ms for row in plan.rows)
    if timed:
        columns += ["tok/s", "tok/s,\nlow to high", "limited\nby"]
    if plan.target is not None:
        columns.append(f"longest at\n{plan.target:g} tok/s")
    table = FigureTable(_title(plan), "", columns)
    for heading, rows in _sections(plan):
        if heading:
            table.section(heading)
        for row in rows:
            table.add(row.recipe, *_plan_cells(plan, row, timed, unit))
    problems = [f"{row.recipe}: {row.problem}" for row in plan.rows if row.problem]
    notes = [Text(text, "yellow") for text in (*problems, *plan.warnings)]
    return Group(table, *notes, Text(" ".join(_plan_caption(plan, timed)), "dim"))


def _title(plan: Plan) -> str:
    from ..planner.units import show_bytes

    model = plan.model
    weights = f"{show_bytes(model.weights.nbytes)} of {model.weights.quantized or ''} weights"
    text = (
        f"{model.name} ({model.architecture}, {model.layers} layers, "
        f"{weights.replace('  ', ' ')}), "
        f"{plan.context:,} tokens of context, batch {plan.batch}"
    )
    if plan.hardware is not None:
        text += f"; {plan.hardware.describe()}"
    if plan.memory is not None and (plan.hardware is None or plan.memory != plan.hardware.memory):
        text += f"; {show_bytes(plan.memory)} of memory"
    return text


def _unit(plan: Plan) -> tuple[int, str]:
    """Return the bytes and the name of the unit of all sizes in the table."""
    most = max((row.peak_bytes or row.kv_bytes or 0 for row in plan.rows), default=0)
    return (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")


def _sections(plan: Plan) -> list[tuple[str, Sequence[PlanRow]]]:
    """Return rows by heading: those that reach the target first."""
    if plan.target is None:
        return [("", plan.rows)]
    reaching = [row for row in plan.rows if row.reaches]
    others = [row for row in plan.rows if not row.reaches]
    sections = [
        (f"reach {plan.target:g} tok/s", reaching),
        (f"do not reach {plan.target:g}, or do not fit", others),
    ]
    return [(heading, rows) for heading, rows in sections if rows]


def _plan_cells(plan: Plan, row: PlanRow, timed: bool, unit: int) -> list[str]:
    from ..planner.units import show_rate

    if row.problem or row.kv_bytes is None:
        return ["–"]
    peak = "–" if row.peak_bytes is None else f"{row.peak_bytes / unit:,.2f}"
    cells = [f"{row.kv_bytes / unit:,.2f}", peak]
    if plan.memory is not None:
        cells.append("yes" if row.fits else "chunked" if row.fits_in_chunks else "no")
        cells += map(_count_text, (row.longest_context, row.longest_in_chunks, row.largest_batch))
    if timed and row.step_ms and row.tokens_s:
        rates = row.tokens_s
        cells += [
            show_rate(rates.best),
            f"{show_rate(rates.low)} to {show_rate(rates.high)}",
            row.limit or "",
        ]
    elif timed:
        cells += ["–"] * 3
    if plan.target is not None:
        cells.append(_count_text(row.longest_at_target))
    return cells


def _count_text(number: int | None) -> str:
    from ..planner.units import UNLIMITED

    if number is None:
        return "–"
    return "no limit" if number >= UNLIMITED else f"{number:,}" if number else "none"


def _plan_caption(plan: Plan, timed: bool) -> list[str]:
    """Return sentences that explain the columns."""
    from ..planner.hardware import PRESETS

    sentences = [
        "KV: the cache with all its metadata, exact. Peak: weights, cache and activations while a "
        "prompt is read in one step."
    ]
    if plan.memory is not None:
        sentences.append(
            "Fits: the peak is within the memory; chunked: only weights and cache are, so read the "
            f"prompt in small chunks. Longest context: at batch {plan.batch}. Largest batch: at "
            f"{plan.context:,} tokens."
        )
    if timed and plan.hardware is not None:
        sentences.append(
            "Tok/s: in decoding, all rows together. Limited by: what takes most of a step "
            "(reading weights, reading the KV cache, arithmetic, or the overhead of Python)."
        )
        sentences += plan.hardware.notes()
    elif plan.hardware is None:
        sentences.append(f"Times need --hardware: {', '.join(PRESETS)}, this, or a file.")
    return sentences


def tuning_table(tuning: Tuning, name: str) -> FigureTable:
    """Return the layers as rows; neighbours with the same choice share a row. name: the model's."""
    tuned = tuning.tuned
    title = (
        f"{name}, {tuned.bound}: {tuned.share:.1%} of the bytes, KL {tuned.kl:.4g} "
        f"(99%: {tuned.kl_p99:.4g}; predicted {tuned.predicted_kl:.4g}), context {tuned.context:,}"
    )
    rows = FigureTable(title, "layers", ["keys", "values", "kept", "KL"])
    for choice, run in groupby(tuning.choices, key=tuning.choices.__getitem__):
        layers = list(run)
        first, last = layers[0], layers[-1]
        cost = sum(tuning.predicted[i] for i in layers)
        where = f"{first}" if first == last else f"{first}-{last}"
        rows.add(where, *choice, f"{cost:.2g}")
    return rows


def tuning_data(tuning: Tuning, environment: dict[str, Any]) -> dict[str, Any]:
    """Return the figures as plain data; the fields are those of docs/reference/json.md."""
    layers = [
        {"layer": n, **choice._asdict(), "kl": tuning.predicted[n]}
        for n, choice in tuning.choices.items()
    ]
    uniform = [{"recipe": name, "share": x, "kl": kl} for name, x, kl in tuning.uniform]
    return {
        "environment": environment,
        "recipe": tuning.recipe.to_dict(),
        "layers": layers,
        "front": [{"share": share, "kl": kl} for share, kl in tuning.front],
        "uniform": uniform,
    }


_ATTENTION_COLUMNS = (
    "sparsity", "90% of mass\nin tokens", "variance\nof mass", "tokens\nin cache", "mass\nkept",
)  # fmt: skip


def attention_table(layers: Sequence[LayerAttention], environment: dict[str, Any]) -> Group:
    """Return a table of the layers."""
    from ..analyse.attention import THRESHOLD

    title = f"{environment['model']} ({environment['dtype']}), {environment['recipe']}"
    rows = FigureTable(title, "layer", _ATTENTION_COLUMNS, numbers=True)
    for x in layers:
        rows.add(
            str(x.number), f"{x.sparsity:.1%}", f"{x.most:.1%}", f"{x.variance:.4g}",
            f"{x.held_tokens:,}", f"{x.kept:.1%}",
        )  # fmt: skip
    caption = (
        f"{environment['context']:,} tokens of {environment['text']} as a prompt, then "
        f"{environment['new_tokens']} one by one. "
        f"sparsity: weights below {THRESHOLD:.0%} of the largest of their query; variance: of the "
        "attention that a token receives from the prompt; tokens in cache: of a head, after the "
        "prompt; mass kept: share of the later queries' attention on tokens in the cache."
    )
    return Group(rows, Text(caption, "dim"))


def error_table(
    errors_by_recipe: dict[str, dict[int, LayerError]], environment: dict[str, Any]
) -> Group:
    """Return the mean errors of each recipe, and its output error in every layer."""
    from ..analyse.error import NAMES, mean

    columns = [*(name.replace("_", "\n") for name in NAMES), "output by layer"]
    rows = FigureTable(str(environment.get("model", "")), "recipe", columns)
    for recipe, errors in errors_by_recipe.items():
        average = mean(errors)
        cells = [f"{getattr(average, name):.2%}" for name in NAMES]
        by_layer = " ".join(f"{errors[i].output:.0%}" for i in sorted(errors))
        rows.add(recipe, *cells, by_layer)
    caption = (
        "|x - x'| / |x| with every token quantized, without recent window and sinks; weights: of "
        "attention; output values: with exact weights; output: with keys and values quantized."
    )
    return Group(rows, Text(caption, "dim"))


def distribution_table(distributions: Sequence[Distribution], environment: dict[str, Any]) -> Group:
    """Return a table of layers, each with keys and values."""
    from ..analyse.distribution import KINDS

    columns = ("largest over\nmedian channel", "spread in\nplain groups", "in calibrated\ngroups")
    title = f"{environment['model']} ({environment['dtype']}), {environment['recipe']}"
    rows = FigureTable(title, "layer", columns)
    for d in distributions:
        after = "" if d.after is None else f"{d.after:.2f}"
        rows.add(f"{d.layer} {KINDS[d.kind]}", f"{d.outliers:.1f}x", f"{d.before:.2f}", after)
    channels = distributions[0].group if distributions else 0
    caption = (
        f"{environment['context']:,} tokens of {environment['text']}. spread: mean range of "
        f"a group in a token, over the mean magnitude; groups have {channels} channels on average."
    )
    return Group(rows, Text(caption, "dim"))


def modes_table(title: str, checks: Sequence[ModeCheck]) -> Group:
    """Return a table of the checks of modes."""
    rows = FigureTable(title, "mode", ("result", "difference", "tokens\nequal", "seconds"))
    for x in checks:
        off = "" if x.difference is None else f"{x.difference:.1e}"
        tokens = "" if x.tokens is None else f"{x.tokens:.0%}"
        rows.add(x.mode, x.result, off, tokens, f"{x.seconds:.1f}")
    notes = [f"{x.mode}: {x.note}" for x in checks if x.note]
    caption = (
        "difference: the largest of a step's logits, relative to their spread; `full` against the "
        "plain model, and kernels against torch."
    )
    return Group(rows, *(Text(note) for note in notes), Text(caption, "dim"))


def verdict_block(verdict: Verdict, model: str) -> Group:
    """Return a claim, the paper's figures, ours, and the verdict; rich can print it."""
    from ..papers.claim import STYLES

    claim = verdict.claim
    heading = Text.assemble((f"{claim.name}: ", "bold"), claim.text)
    parts: list[Any] = [heading, Text(claim.where, "dim")]
    if claim.paper is not None:
        parts.append(_claim_table("the paper", claim.paper))
    if verdict.ours is not None:
        parts.append(_claim_table(model, verdict.ours))
    if claim.rule and verdict.ours is not None:
        parts.append(Text(f"rule: {claim.rule}", "dim"))
    if verdict.evidence:
        parts.append(Text(f"measured: {verdict.evidence}"))
    parts.append(Text(f"{verdict.status}{_because(verdict)}", STYLES[verdict.status]))
    return Group(*parts, Text())


def verdict_line(verdict: Verdict) -> str:
    """Return a verdict in one line."""
    return f"{verdict.claim.name}: {verdict.status}{_because(verdict)}"


def verdict_summary(verdicts: Sequence[Verdict]) -> str:
    """Return how many claims have each status."""
    from ..papers.claim import STYLES

    counts = Counter(verdict.status for verdict in verdicts)
    return ", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status])


def verdict_data(
    paper: str, verdicts: Sequence[Verdict], environment: dict[str, Any]
) -> dict[str, Any]:
    """Return the verdicts as plain data."""
    claims = [
        {
            "name": v.claim.name,
            "claim": v.claim.text,
            "where": v.claim.where,
            "rule": v.claim.rule,
            "status": v.status,
            "paper": v.claim.paper and asdict(v.claim.paper),
            "ours": v.ours and asdict(v.ours),
            "evidence": v.evidence,
            "reason": v.explanation,
        }
        for v in verdicts
    ]
    return {"environment": environment, "paper": paper, "claims": claims}


def _because(verdict: Verdict) -> str:
    return f": {verdict.explanation}" if verdict.explanation else ""


def _claim_table(title: str, figures: ClaimTable) -> FigureTable:
    table = FigureTable(title, "", tuple(figures.columns))
    for name, cells in figures.rows.items():
        table.add(name, *(_claim_cell(x) for x in cells))
    return table


def _claim_cell(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 or value == 0 else f"{value:.2g}"


def entries_table(rows: Sequence[Mapping[str, Any]], nbytes: int) -> FigureTable:
    """Return the entries of a prompt store as rows. nbytes: of its folder."""
    title = f"{len(rows):,} entries; the folder has {nbytes / 2**20:,.1f} MiB"
    table = FigureTable(title, "key", ["tokens", "MiB", "recipe", "model", "last used"])
    for row in rows:
        size = f"{row['nbytes'] / 2**20:,.2f}"
        cells = f"{row['tokens']:,}", size, row["recipe"], row["model"], row["used"]
        table.add(row["key"][:16], *cells)
    return table


def entry_table(data: Mapping[str, Any]) -> FigureTable:
    """Return an entry of a prompt store, its fields as rows."""
    ids = data["ids"]
    first = ", ".join(map(str, ids[:8])) + ", …" * (len(ids) > 8)
    table = FigureTable(data["key"], "", [""])
    for name in ("tokens", "nbytes", "created", "used", "calibration"):
        table.add(name, str(data[name]))
    for name, x in data["model"].items():
        table.add(name if name == "model" else f"model: {name}", str(x))
    table.add("recipe", data["recipe"]["name"])
    table.add("token ids", first)
    return table
