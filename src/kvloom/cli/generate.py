"""`kvloom generate`: a prompt in, text out, and what the cache held."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .edge import Dtype, Model, argument, quiet, stdin, told

if TYPE_CHECKING:
    from ..hf.cache import Cache


def command(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to go on from; -: read it from stdin.")
    ] = "-",
    model: Model = "reference",
    recipe: Annotated[
        str, typer.Option(help='Such as "kivi:bits=4"; see kvloom recipes.')
    ] = "kivi",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Above 0: sample; 0: the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of sampling.")] = 0,
    dtype: Dtype = "auto",
) -> None:
    """Generate text on a compressed cache; figures of the cache go to stderr."""
    with told():
        from ..compare import InputError, load
        from ..compare.run import check_room
        from ..hf.cache import Cache
        from ..recipes import resolve

        chosen = resolve(recipe)
        text = stdin() if prompt == "-" else argument("the prompt", prompt)
        if not text.strip():
            raise InputError("the prompt is empty; give some text to go on from")
        quiet()
        built, tokenizer = load(model, dtype)
        cache = Cache(built, chosen)
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(built.device)
        check_room(built, ids.shape[1], max_new_tokens)
        clock = _generate(built, tokenizer, ids, cache, max_new_tokens, temperature, seed)
        typer.echo(_figures(cache, ids.shape[1], clock), err=True)


def _generate(
    model: Any, tokenizer: Any, ids: Any, cache: Cache, most: int, temperature: float, seed: int
) -> list[float]:
    """Stream the continuation to stdout; return the times at which tokens came, the start first.

    The clock stands still while kernels are compiled.
    """
    import torch
    from transformers import TextStreamer

    from ..kernels.dispatch import compile_seconds

    class Clocked(TextStreamer):
        def put(self, value: Any) -> None:
            times.append(time.perf_counter() - compile_seconds())
            super().put(value)

    times: list[float] = []
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        chosen["temperature"] = temperature
    end = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=most,
            pad_token_id=end,
            streamer=Clocked(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **chosen,
        )
    return times


def _figures(cache: Cache, prompt_tokens: int, times: list[float]) -> str:
    from ..kernels.dispatch import compile_seconds

    new = len(times) - 1
    saved = cache.full_nbytes - sum(layer.cache.nbytes for layer in cache.routed)
    parts = [
        f"{cache.recipe.name}: {prompt_tokens} + {new} tokens",
        f"{cache.nbytes / 2**20:.2f} MiB held",
        f"{(cache.nbytes + saved) / cache.nbytes:.1f}x smaller than full",
        f"{cache.bits_per_value:.2f} bits a value",
    ]
    if new > 1:
        parts.append(f"{(new - 1) / (times[-1] - times[1]):.1f} tokens/s")
    if compile_seconds() > 0.1:
        parts.append(f"kernels ready after {compile_seconds():.1f} s more")
    return ", ".join(parts)
