"""`kvloom generate` and `kvloom inspect`: run a recipe on one text; `kvloom warm`: prepare it."""

from __future__ import annotations

import json as js
import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.errors import InputError

from ..recommended import DEFAULT_RECIPE
from .options import (
    RECIPE_HELP,
    ChosenModel,
    Dtype,
    Model,
    check_utf8,
    option,
    parse_recipes,
    printable_name,
    read_stdin,
    text_name,
)
from .outputs import check_outputs, write_file
from .progress import show_progress

if TYPE_CHECKING:
    from kvloom import Cache
    from kvloom.recipe import Recipe


def generate_command(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; -: read it from stdin.")
    ] = "-",
    model: Model = "reference",
    recipe: Annotated[str, option(RECIPE_HELP)] = DEFAULT_RECIPE,
    max_new_tokens: Annotated[int, option("Stop after this many new tokens.", min=1)] = 128,
    temperature: Annotated[
        float, option("Sample; 0: the likeliest token at each step.", min=0, max=100)
    ] = 0.0,
    seed: Annotated[int, option("Seed of sampling.", min=0, max=2**64 - 1)] = 0,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Apply the tokenizer's chat template to the prompt."),
    ] = False,
    dtype: Dtype = "auto",
) -> None:
    """Generate text on a compressed cache; figures of the cache are printed on stderr."""
    from kvloom import Cache
    from kvloom.recipe import resolve

    from ..models import check_positions

    if 0 < temperature < 0.01:
        raise InputError(f"--temperature {temperature} is too near 0; give 0, or 0.01 to 100")
    chosen = resolve(recipe)
    text = read_stdin() if prompt == "-" else check_utf8("the prompt", prompt)
    if not text.strip():
        raise InputError("the prompt is empty; give some text to continue")
    chosen_model = ChosenModel(model, dtype)
    tokenizer = chosen_model.tokenizer
    if chat:
        ids = _chat_ids(tokenizer, text, chosen_model.name)
    else:
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]  # [1, tokens]
    check_positions(chosen_model.config, ids.shape[1], max_new_tokens)
    with show_progress() as progress:
        loaded = chosen_model.load(progress)
    cache, ids = Cache(loaded, chosen), ids.to(loaded.device)
    times = _generate(loaded, tokenizer, ids, cache, max_new_tokens, temperature, seed)
    typer.echo(_figures(cache, ids.shape[1], times), err=True)


def _chat_ids(tokenizer: Any, text: str, model: str) -> Any:
    """Return the ids of a chat with the text as the user's message, int64 [1, tokens]."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"the tokenizer of model {model!r} has no chat template; omit --chat, or give an "
            "instruct model"
        )
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )["input_ids"]  # fmt: skip


def _generate(
    model: Any,
    tokenizer: Any,
    ids: Any,
    cache: Cache,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[float]:
    """Stream the continuation to stdout; return the start time and the time of each new token."""
    import torch
    from transformers import GenerationConfig, TextStreamer

    from ..workload import clock

    class TimedStreamer(TextStreamer):
        def put(self, value: Any) -> None:
            times.append(clock.seconds())
            super().put(value)

    times: list[float] = []
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling["temperature"] = temperature
    end = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    own = model.generation_config
    model.generation_config = GenerationConfig(  # without penalties, beams and the like
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=end
    )
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            streamer=TimedStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **sampling,
        )
    return times


def warm_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help='Hub id or folder of a model, or "smollm2".')
    ] = "reference",
    recipes: Annotated[
        str, option("The recipes whose kernels are compiled, with their options.")
    ] = DEFAULT_RECIPE,
    dtype: Dtype = "auto",
) -> None:
    """Compile the CPU kernels that recipes need for a model, and store them on disk.

    Reads the model's config, and no weights.
    """
    from kvloom import Cache
    from kvloom.cache import rehearse
    from kvloom.kernels import companion, compile_seconds, use_backend

    from ..models import model_without_weights

    chosen, chosen_model = parse_recipes(recipes), ChosenModel(model, dtype)
    if chosen_model.geometry is None:
        raise InputError(f"the config of {chosen_model.name} has no dtype; give --dtype")
    companion.disable()
    empty = model_without_weights(chosen_model.config, dtype)
    for recipe in chosen:
        before = compile_seconds()
        with use_backend("auto"):
            rehearse(Cache(empty, recipe).rehearsals(), prompt=True)
        typer.echo(f"{recipe.name}: {compile_seconds() - before:.1f} s")


def _figures(cache: Cache, prompt_tokens: int, times: list[float]) -> str:
    from kvloom.kernels import compile_seconds

    new = len(times) - 1
    parts = [f"{cache.recipe.name}: {prompt_tokens} + {new} tokens", *_sizes(cache)]
    if new > 1:
        parts.append(f"{(new - 1) / (times[-1] - times[1]):.1f} tokens/s")
    if compile_seconds() > 0.1:
        parts.append(f"{compile_seconds():.1f} s more to compile kernels")
    return ", ".join(parts)


def _sizes(cache: Cache) -> list[str]:
    """Return the cache's size, and how much smaller it is than full or why it is not smaller."""
    from kvloom.cache import holds_packed

    nbytes, full, recipe = cache.nbytes, cache.full_nbytes, cache.recipe
    sizes = [f"{nbytes / 2**20:.2f} MiB in the cache"]
    if not cache.full_layers:
        return [*sizes, "no layer compressed: sliding windows limit all of them already"]
    if cache.full_layers[0].get_seq_length() <= recipe.compress_after:
        limit = recipe.compress_after
        return [*sizes, f"all exact: {recipe.name} begins after {limit:,} tokens (compress_after)"]
    begin = first_packed_at(recipe)
    if begin is not None and not any(holds_packed(layer.cache) for layer in cache.full_layers):
        unit = "kept tokens" if recipe.keep is not None else "tokens"
        return [*sizes, f"nothing packed yet: {recipe.name} starts to pack at {begin} {unit}"]
    if full < 1.05 * nbytes:
        sizes.append("no smaller than full")
    else:
        sizes.append(f"{full / nbytes:.1f}x smaller than full")
    return [*sizes, f"{cache.bits_per_value:.2f} bits per value"]


def first_packed_at(recipe: Recipe) -> int | None:
    """Return the tokens of a layer at which its first token is packed; None if none ever is."""
    begins = [
        next(n for n in count(1) if fmt.to_pack(n, recent, prompt=False))
        for fmt, recent in recipe.formats_and_recents
        if fmt is not None
    ]
    return recipe.protect.sinks + min(begins) if begins else None


def inspect_command(
    argument: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT", help="A text file, or the text itself; - or nothing: read stdin."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Text file to read, repeatable."),
    ] = None,
    model: Model = "reference",
    recipe: Annotated[str, option(RECIPE_HELP)] = "h2o",
    out: Annotated[Path, option("The page to write.", metavar="FILE")] = Path("inspect.html"),
    context: Annotated[int, option("Read at most this many tokens of the text.", min=1)] = 1024,
    max_new_tokens: Annotated[int, option("Tokens to generate after it.", min=0)] = 32,
    dtype: Dtype = "auto",
    json: Annotated[
        str | None,
        option("Write the page's data as JSON too; -: to stdout.", metavar="FILE"),
    ] = None,
) -> None:
    """Show which tokens a recipe keeps: one HTML page that needs no network and no other file.

    The page shows every token, shaded by the number of heads that have it in their cache, after the
    prompt and after each generated token; tokens and attention mass kept, by layer and head; and
    every token's score. For recipes with recall: the tokens that each step read, and their clusters
    or pages.
    """
    from kvloom.recipe import resolve

    from ..inspect import prompt_ids, trace_recipe
    from ..show.pages import inspect_page

    chosen = resolve(recipe)  # a wrong name is refused before anything is loaded
    check_outputs(out, json)
    content, source = _read(argument, text)
    # So are a wrong model, and a text that is too long.
    chosen_model = ChosenModel(model, dtype)
    prompt_ids(chosen_model.config, chosen_model.tokenizer, content, context, max_new_tokens)
    with show_progress() as progress:
        loaded = chosen_model.load(progress)
        trace = trace_recipe(
            loaded, chosen_model.tokenizer, chosen, content, context=context,
            new_tokens=max_new_tokens, progress=progress.counter(max_new_tokens + 1),
        )  # fmt: skip
    data = {"model": chosen_model.name, "source": source, **trace}
    write_file(out, inspect_page(data))
    if json == "-":
        typer.echo(js.dumps(data, ensure_ascii=False))
    elif json:
        write_file(json, js.dumps(data, ensure_ascii=False))
    typer.echo(_summary(data, out), err=json == "-")


def _read(argument: str | None, files: list[Path] | None) -> tuple[str, str]:
    """Return the text to inspect, and its name."""
    from ..workload.text import read_files

    if files:
        if argument is not None:
            raise InputError("give the text either as TEXT or with --text, not both")
        return read_files(files), text_name(files)
    if argument is None or argument == "-":
        return read_stdin(), "text from stdin"
    path = Path(argument)
    if argument and os.path.exists(argument):  # Path.exists raises for a text longer than a name
        return read_files([path]), printable_name(path)
    if len(argument.split()) == 1 and (path.suffix or len(path.parts) > 1):
        raise InputError(
            f"there is no file {argument!r}; give a file that exists, or the text itself"
        )
    return check_utf8("the text", argument), "text from the command line"


def _summary(data: dict, out: Path) -> str:
    read, text = data["prompt_tokens"], data["text_tokens"]
    cut = f" (the first of {text:,}; --context takes more)" if text > read else ""
    mass = [head["mass"][0] for layer in data["layers"] for head in layer["heads"]]
    kept = f", {sum(mass) / len(mass):.1%} of the prompt's attention mass kept" if mass else ""
    recalling = [head for layer in data["layers"] for head in layer["heads"] if head["read"]]
    if recalling and data["steps"]:
        tokens = sum(sum(head["read"][-1][1::2]) for head in recalling) / len(recalling)
        share = sum(head["read_mass"][-1] for head in recalling) / len(recalling)
        kept += (
            f"; in the last step key/value heads with recall read {tokens:,.0f} of "
            f"{read + data['steps']:,} tokens, {share:.1%} of its attention mass"
        )
    return (
        f"{data['recipe']}: {read:,} tokens{cut} + {data['steps']} generated{kept}; wrote {out} "
        f"({out.stat().st_size / 1000:,.0f} kB)"
    )
