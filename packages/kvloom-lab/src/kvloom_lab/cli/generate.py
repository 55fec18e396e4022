"""`kvloom generate`: generate text from a prompt, and report the size of the cache."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.errors import InputError

from .options import RECIPE_HELP, ChosenModel, Dtype, Model, check_utf8, read_stdin
from .outputs import user_errors
from .progress import show_progress

if TYPE_CHECKING:
    from kvloom import Cache
    from kvloom.recipe import Recipe


def command(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; -: read it from stdin.")
    ] = "-",
    model: Model = "reference",
    recipe: Annotated[str, typer.Option(help=RECIPE_HELP)] = "near-lossless",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Stop after this many new tokens.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Above 0: sample; 0: the likeliest token at each step.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of sampling.")] = 0,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Apply the tokenizer's chat template to the prompt."),
    ] = False,
    dtype: Dtype = "auto",
) -> None:
    """Generate text on a compressed cache; figures of the cache are printed on stderr."""
    with user_errors():
        from kvloom import Cache
        from kvloom.recipe import resolve

        from ..models import check_positions

        chosen = resolve(recipe)
        text = read_stdin() if prompt == "-" else check_utf8("the prompt", prompt)
        if not text.strip():
            raise InputError("the prompt is empty; give some text to continue")
        known = ChosenModel(model, dtype)
        tokenizer = known.tokenizer
        if chat:
            ids = _chat_ids(tokenizer, text, known.name)
        else:
            ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]  # [1, tokens]
        check_positions(known.config, ids.shape[1], max_new_tokens)
        with show_progress() as progress:
            loaded = known.load(progress)
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
    from transformers import TextStreamer

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
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            pad_token_id=end,
            streamer=TimedStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **sampling,
        )
    return times


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
    if not cache.routed:
        return [*sizes, "no layer compressed: sliding windows limit all of them already"]
    begin = first_packed_at(recipe)
    if begin is not None and not any(holds_packed(layer.cache) for layer in cache.routed):
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
        for fmt, recent in zip(
            (recipe.store.keys, recipe.store.values), recipe.protect.recents, strict=True
        )
        if fmt is not None
    ]
    return recipe.protect.sinks + min(begins) if begins else None
