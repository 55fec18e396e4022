"""`kvloom generate`: a prompt in, text out, and what the cache held."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .edge import RECIPE, Dtype, Model, argument, loaded, named, quiet, stdin, told
from .progress import progress

if TYPE_CHECKING:
    from ..hf.cache import Cache
    from ..recipe.spec import Recipe


def command(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to go on from; -: read it from stdin.")
    ] = "-",
    model: Model = "reference",
    recipe: Annotated[str, typer.Option(help=RECIPE)] = "kivi",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Above 0: sample; 0: the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of sampling.")] = 0,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put the prompt into the tokenizer's chat template."),
    ] = False,
    dtype: Dtype = "auto",
) -> None:
    """Generate text on a compressed cache; figures of the cache go to stderr."""
    with told():
        from ..eval import InputError, load_small
        from ..hf.cache import Cache
        from ..recipe.resolve import resolve
        from ..workload.models import check_room

        chosen = resolve(recipe)
        text = stdin() if prompt == "-" else argument("the prompt", prompt)
        if not text.strip():
            raise InputError("the prompt is empty; give some text to go on from")
        quiet()
        config, tokenizer = load_small(model, dtype)
        ids = _chat_ids(tokenizer, text, named(model)) if chat else _ids(tokenizer, text)
        check_room(config, ids.shape[1], max_new_tokens)
        with progress() as shown:
            built = loaded(model, dtype, shown)
        cache, ids = Cache(built, chosen), ids.to(built.device)
        clock = _generate(built, tokenizer, ids, cache, max_new_tokens, temperature, seed)
        typer.echo(_figures(cache, ids.shape[1], clock), err=True)


def _ids(tokenizer: Any, text: str) -> Any:
    """The prompt's ids, int64 [1, tokens]."""
    return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]


def _chat_ids(tokenizer: Any, text: str, model: str) -> Any:
    """The ids of a chat in which the user has said the text, int64 [1, tokens]."""
    from ..eval import InputError

    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"the tokenizer of model {model!r} has no chat template; leave out --chat, or give an "
            "instruct model"
        )
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )["input_ids"]  # fmt: skip


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
    parts = [f"{cache.recipe.name}: {prompt_tokens} + {new} tokens", *_sizes(cache)]
    if new > 1:
        parts.append(f"{(new - 1) / (times[-1] - times[1]):.1f} tokens/s")
    if compile_seconds() > 0.1:
        parts.append(f"kernels ready after {compile_seconds():.1f} s more")
    return ", ".join(parts)


def _sizes(cache: Cache) -> list[str]:
    """What the cache holds, and how much smaller that is, or why it is no smaller."""
    held, recipe = cache.nbytes, cache.recipe
    full = held + cache.full_nbytes - sum(layer.cache.nbytes for layer in cache.routed)
    sizes = [f"{held / 2**20:.2f} MiB held"]
    if not cache.routed:
        return [*sizes, "no layer compressed: their sliding windows bound them"]
    begin = packs_from(recipe)
    segments = [layer.cache.tokens for layer in cache.routed]
    if begin is not None and not any(getattr(s, "packed", False) for s in segments):
        of = "tokens held" if recipe.keep is not None else "tokens"
        return [*sizes, f"nothing packed yet: {recipe.name} starts to pack at {begin} {of}"]
    if full < 1.05 * held:
        sizes.append("no smaller than full")
    else:
        sizes.append(f"{full / held:.1f}x smaller than full")
    return [*sizes, f"{cache.bits_per_value:.2f} bits a value"]


def packs_from(recipe: Recipe) -> int | None:
    """Tokens that a layer holds when it packs the first of them; None if it packs none."""
    begins = [
        next(n for n in count(1) if fmt.to_pack(n, recent, prompt=False))
        for fmt, recent in zip(
            (recipe.store.keys, recipe.store.values), recipe.protect.recents, strict=True
        )
        if fmt is not None
    ]
    return recipe.protect.sinks + min(begins) if begins else None
