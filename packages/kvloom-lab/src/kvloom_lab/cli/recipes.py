"""`kvloom recipes`, `plan`, `tune` and `calibrate`: choose a recipe, and prepare a model for it."""

from __future__ import annotations

import inspect
import json as js
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloom.errors import InputError

from .options import (
    RECIPES_HELP,
    ChosenModel,
    Dtype,
    Json,
    Text,
    option,
    parse_recipes,
    silence_transformers,
    text_name,
)
from .outputs import (
    check_outputs,
    finish,
    output_width,
    print_rich,
    show_results,
    write_file,
)
from .progress import show_progress

_REUSE = {
    "blocks": "any whole blocks of 64 tokens at a prompt's beginning",
    "whole": "a prompt as it was read, as its end decides what is kept or indexed",
}


def recipes_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help='One recipe, such as "kivi:bits=4" or recipe.toml.'),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    toml: Annotated[bool, typer.Option("--toml", help="Write a recipe file; needs NAME.")] = False,
) -> None:
    """List the recipes and their options; with a name, show that recipe, its paper and its TOML.

    The options of a recipe follow its name: "kivi:bits=4,group=64". Every recipe has the option
    compress_after: "kivi:compress_after=2048" keeps everything exact up to 2048 tokens. Some layers
    can have another recipe: "kivi@first 2=full@20-23=kivi:bits=4". Save the output of --toml to
    a file, change it, and give the file's name wherever a recipe is expected.
    """
    from kvloom.recipe import RECIPES

    if toml and (name is None or json):
        raise InputError("--toml writes one recipe file; give a NAME, and leave out --json")
    if name is not None and toml:
        typer.echo(describe(name)["toml"], nl=False)
    elif name is not None:
        recipe = describe(name)
        typer.echo(js.dumps(recipe, indent=2, ensure_ascii=False) if json else _page(recipe))
    elif json:
        summaries = [_summary(n) for n in RECIPES]
        typer.echo(js.dumps(summaries, indent=2, ensure_ascii=False))
    else:
        _print_list([_summary(n) for n in RECIPES])


def describe(spec: str) -> dict[str, Any]:
    """Return name, summary, options and docs of a recipe, and the recipe as data and as TOML.

    For a recipe of any score, index or format, also the choices: their names and options.
    """
    from kvloom.recipe import RECIPES, part_options, resolve

    recipe = resolve(spec)
    name = re.split("[:@]", spec)[0].strip()
    if name in RECIPES:
        about = {**_summary(name), "docs": _docs(RECIPES[name])}
        if choices := part_options(name):
            about["choices"] = choices
    else:
        about = {"name": spec, "summary": "A recipe file.", "options": {}, "docs": ""}
    more = {"reuse": recipe.reuse, "recipe": recipe.to_dict(), "toml": recipe.to_toml()}
    return {**about, **more}


def _docs(build: Callable[..., Any]) -> str:
    """Return the docstring of a recipe without its summary, and that of its family, the module."""
    _, _, details = (inspect.getdoc(build) or "").partition("\n")
    family = inspect.cleandoc(getattr(sys.modules.get(build.__module__), "__doc__", None) or "")
    return "\n\n".join(text for text in (details.strip(), family) if text)


def _summary(name: str) -> dict[str, Any]:
    from kvloom.recipe import options, summary

    return {"name": name, "summary": summary(name), "options": options(name)}


def _options_text(recipe: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in recipe["options"].items())


def _page(recipe: dict[str, Any]) -> str:
    defaults = _options_text(recipe) or "none"
    options = f"options and their defaults: {defaults}" if recipe["docs"] else ""
    head = f"{recipe['name']}: {recipe['summary']}"
    choices = [
        _choice(kind, choice_options) for kind, choice_options in recipe.get("choices", {}).items()
    ]
    listed = "\n".join(["choices and their options:", *choices]) if choices else ""
    reuse = f"a prompt store reuses {_REUSE[recipe['reuse']]}"
    parts = [head, options, recipe["docs"], listed, reuse, "as TOML:", recipe["toml"].rstrip()]
    return "\n\n".join(part for part in parts if part)


def _choice(kind: str, choice_options: dict[str, Any]) -> str:
    spelled = ", ".join(k if v is None else f"{k}={v}" for k, v in choice_options.items())
    return f"  {kind}: {spelled}" if spelled else f"  {kind}"


def _print_list(descriptions: list[dict[str, Any]]) -> None:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    narrow: list[Any] = []  # for outputs too narrow for two columns
    for recipe in descriptions:
        lines = [Text(recipe["summary"])]
        if recipe["options"]:
            lines.append(Text(_options_text(recipe), "dim"))
        table.add_row(Text(recipe["name"], "bold"), Group(*lines))
        narrow += [Text(recipe["name"], "bold"), Padding(Group(*lines), (0, 0, 0, 2))]
    print_rich(table if output_width() >= 50 else Group(*narrow))


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder with config.json, config file, or hub id; no weights are needed.",
        ),
    ],
    recipes: Annotated[
        str | None, option(f"{RECIPES_HELP}; default: full, the recommended ones and nine others.")
    ] = None,
    context: Annotated[
        str | None,
        option("Tokens, such as 8192 or 128k; default: 32k, or the model's positions if fewer."),
    ] = None,
    batch: Annotated[int, option("Rows of the batch.", min=1)] = 1,
    memory: Annotated[
        str | None, option("Memory, such as 24GiB or 80GB; default: the hardware's.")
    ] = None,
    hardware: Annotated[
        str | None,
        option(
            "h100, h200, b200, a100, mi300x, rtx4090, rtx5090, m4-max, this (measure this "
            "machine once), or a TOML file. Without it, the plan has no times."
        ),
    ] = None,
    target: Annotated[
        str | None, option("Decode speed to reach, such as 20tok/s; needs --hardware.")
    ] = None,
    json: Json = None,
    plot: Annotated[
        Path | None, option("Plot memory and speed by context.", metavar="FILE")
    ] = None,
) -> None:
    """Plan: bytes, the longest context, the largest batch and the decode speed of recipes.

    The command reads only the model's config. Bytes are exact. Times are estimates with low and
    high bounds; "this" measures the machine once and stores the result.

    The exit status is 1 if a recipe that you named does not fit the model, or if nothing reaches
    the target.
    """
    from kvloom.units import parse_bytes

    from ..planner.units import parse_rate, parse_tokens

    # A wrong option is refused before anything is loaded.
    chosen = None if recipes is None else parse_recipes(recipes)
    tokens = None if context is None else parse_tokens(context)
    nbytes = None if memory is None else parse_bytes(memory)
    rate = None if target is None else parse_rate(target)
    check_outputs(json, plot=plot)
    from ..planner import plan
    from ..planner.plan_recipes import PLAN_RECIPES
    from ..planner.table import plan_table
    from ..show.plots import plan_plot

    silence_transformers()
    with show_progress() as progress:
        progress(f"reading the config of {model}")

        def on_step(units: int) -> Callable[[str, int], None]:
            progress.line("kvloom: measuring this machine once; keep it idle until the end")
            return progress.counter(units)

        planned = plan(
            model, chosen or PLAN_RECIPES, context=tokens, batch=batch, memory=nbytes,
            hardware=hardware, target=rate, on_step=on_step,
        )  # fmt: skip
    if plot:
        plan_plot(planned).savefig(plot)
    show_results(planned.to_dict(), json, plan_table(planned))
    failed = [row.recipe for row in planned.rows if row.problem] if recipes else []
    if rate is not None and not failed and not any(row.reaches for row in planned.rows):
        raise typer.Exit(1)
    finish(None, [], failed)


def tune_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id or folder of a model, or a known name.")
    ],
    text: Annotated[
        list[Path],
        typer.Option("--text", metavar="FILE", help="Text file to tune on, repeatable."),
    ],
    share: Annotated[
        float | None, option("The largest share of the exact cache's bytes: 0.2.")
    ] = None,
    quality: Annotated[
        str | None, option('The largest mean divergence from the exact cache, in nats: "kl=0.01".')
    ] = None,
    context: Annotated[int, option("Tokens of a context, which are compressed.", min=256)] = 2048,
    out: Annotated[Path | None, option("Write the recipe (.toml).", metavar="FILE")] = None,
    dtype: Dtype = "auto",
    json: Json = None,
    plot: Annotated[Path | None, option("Plot divergence against bytes.", metavar="FILE")] = None,
) -> None:
    """Tune a recipe: formats and kept tokens of each layer, within a size or a divergence.

    The layers are scored once; another bound uses the same scores. An interrupted run is continued
    by the same command. Scores are in kvloom's cache folder.
    """
    from ..show.plots import tuning_plot
    from ..tuner import tune
    from ..tuner.problem import Bound
    from ..tuner.table import tuning_data, tuning_table
    from ..workload.machine import conditions
    from ..workload.text import read_files

    kl = None if quality is None else _quality(quality)
    Bound(share, kl, 0)  # an invalid one is refused before the model is loaded
    check_outputs(json, out, plot=plot)
    if out is not None and out.suffix != ".toml":
        raise InputError(f"--out {str(out)!r} must end in .toml, as a recipe file does")
    content = read_files(text)
    chosen = ChosenModel(model, dtype)
    with show_progress() as progress:
        loaded = chosen.load(progress)
        try:
            tuning = tune(
                loaded, chosen.tokenizer, content, share=share, kl=kl, context=context,
                progress=progress,
            )  # fmt: skip
        except KeyboardInterrupt:
            progress.line(
                "kvloom: interrupted; scores that are finished are kept. Run the same command "
                "again to resume."
            )
            raise typer.Exit(130) from None
    if out is not None:
        write_file(out, tuning.recipe.to_toml())
    if plot is not None:
        tuning_plot(tuning, chosen.name).savefig(plot)
    environment = conditions(loaded, chosen.name, text_name(text))
    show_results(tuning_data(tuning, environment), json, tuning_table(tuning, chosen.name))
    if out is None and json is None:
        typer.echo(
            "kvloom: the recipe was not written; run the same command with --out recipe.toml, "
            "which uses the stored scores",
            err=True,
        )


def _quality(option: str) -> float:
    """Return the divergence of "kl=0.01"."""
    name, _, number = option.partition("=")
    try:
        if name.strip() == "kl":
            return float(number)
    except ValueError:
        pass
    raise InputError(f'--quality {option!r} must be a divergence in nats, such as "kl=0.01"')


DEFAULT_RECIPES = "skvq,skvq-k2v1.5,rptq,smoothquant"


def calibrate_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or folder of a model.")],
    out: Annotated[Path, option("The file to write (.kvcal).", metavar="FILE")],
    text: Text = None,
    recipes: Annotated[
        str, option("Recipes to calibrate for, with their options.")
    ] = DEFAULT_RECIPES,
    samples: Annotated[int, option("Contexts to read at most.", min=4)] = 64,
    context: Annotated[int, option("Tokens of a context.", min=64)] = 1024,
    dtype: Dtype = "auto",
) -> None:
    """Calibrate a model: ranges of its channels, groups of channels, clip factors.

    Reading stops early when 8 more contexts hardly widen the ranges. An interrupted run leaves
    FILE.partial; the same command continues it.
    """
    from kvloom.calibrate import Settings, calibrate, cut_contexts

    from ..workload.text import calibration_text, leading_ids, read_files, tokenize

    chosen = parse_recipes(recipes)
    plain = [r.name for r in chosen if not any(store.calibrated for store in r.stores)]
    if plain:
        raise InputError(f"recipe {plain[0]!r} needs no calibration; name other recipes")
    check_outputs(out)
    if out.suffix == ".safetensors" and (out.absolute().parent / "config.json").exists():
        raise InputError(
            f"model loaders would read {str(out)!r} as weights, since it ends in .safetensors "
            f"next to a config.json; write {str(out.with_suffix('.kvcal'))!r} instead"
        )
    content = read_files(text) if text else calibration_text()
    settings, of_model = Settings(contexts=samples, context=context), ChosenModel(model, dtype)
    tokenizer = of_model.tokenizer
    ids = cut_contexts(tokenize(tokenizer, content), leading_ids(tokenizer), settings)
    with show_progress() as progress:
        loaded = of_model.load(progress)

        def on_step(what: str, done: int, total: int) -> None:
            progress(f"{what}, {done} of {total}", done, total)

        calibration = calibrate(loaded, ids, chosen, out, settings, on_step)
    size, read = out.stat().st_size, calibration.settings["read"]
    few = f", as the text has no more; --samples asked for {samples}" if read < samples else ""
    typer.echo(
        f"{out}: {len(calibration.tensors)} tensors, {size:,} bytes, {read} contexts read{few}"
    )
