"""Eviction while a text grows: divergence and bytes of `rotated` with and without blocks.

SmolLM2-135M-Instruct in bfloat16, one thread, reads 768 tokens of prose that no recipe was chosen
on, and then 1,280 more tokens in steps of 16. Divergences are from the exact cache `full`; bytes
are those held, as a share of the exact cache's, at the end and on average over the steps.

    python benchmarks/growing.py
"""

from __future__ import annotations

from dataclasses import replace

import torch

import kvloom
import record
from evidence import prose
from kvloom.recipe import Recipe, resolve
from kvloom_lab.eval.decoding import divergence
from kvloom_lab.models import load

PROMPT, LATER, STEP = 768, 1280, 16
STARTS = 100_000, 400_000  # of the prompt, in tokens of the text
ROTATED = "rotated:fraction={0},recent=64,heads=0.2,layers=joint,fit={2},block={1}"


def recipes() -> dict[str, Recipe]:
    """Return the recipes by name; stored as by `small`."""
    stored = resolve("small")
    chosen = {
        "near-lossless": resolve("near-lossless"),
        "streaming": resolve("streaming:tokens=512"),
    }
    for fraction, block, fit in (
        (0.4, 0, "true"), (0.4, 256, "true"), (0.4, 256, "false"), (0.4, 128, "true"),
        (0.25, 256, "true"), (0.15, 256, "true"),
    ):  # fmt: skip
        recipe = resolve(ROTATED.format(fraction, block, fit))
        name = f"fraction={fraction},block={block},fit={fit}"
        chosen[name] = replace(recipe, store=stored.store, protect=stored.protect, name=name)
    return chosen


@torch.inference_mode()
def read(model: torch.nn.Module, recipe: Recipe, ids: torch.Tensor) -> tuple[torch.Tensor, list]:
    """Return the log-probabilities [LATER, V] after the prompt, and the bytes after each step."""
    cache, logs, sizes = kvloom.Cache(model, recipe), [], []
    model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
    for begin in range(PROMPT, PROMPT + LATER, STEP):
        logits = model(ids[:, begin : begin + STEP], past_key_values=cache).logits[0]
        logs.append(logits.float().log_softmax(dim=-1))
        sizes.append(cache.nbytes / cache.full_nbytes)
    return torch.cat(logs), sizes


def main() -> None:
    record.options(__doc__)
    torch.set_num_threads(1)
    model, tokenizer = load("smollm2", "bfloat16")
    ids, rows = tokenizer(prose(), return_tensors="pt", verbose=False).input_ids, []
    for start in STARTS:
        text = ids[:, start : start + PROMPT + LATER]
        exact, _ = read(model, resolve("full"), text)
        for name, recipe in recipes().items():
            found, sizes = read(model, recipe, text)
            kl = divergence(exact[None], found[None])[0]
            row = {
                "start": start, "recipe": name, "kl_mean": kl.mean().item(),
                "kl_p99": kl.quantile(0.99).item(),
                "agreement": (exact.argmax(-1) == found.argmax(-1)).float().mean().item(),
                "kl_by_fifth": [part.mean().item() for part in kl.chunk(5)],
                "bytes_end": sizes[-1], "bytes_mean": sum(sizes) / len(sizes),
            }  # fmt: skip
            rows.append(row)
            print(
                f"{start:>7} {name:<36} KL {row['kl_mean']:.4f}, 99% {row['kl_p99']:.3f}, bytes "
                f"{row['bytes_end']:.1%} at the end, {row['bytes_mean']:.1%} on average",
                flush=True,
            )
    record.write("growing", {"environment": record.environment(dtype="bfloat16"), "rows": rows})


if __name__ == "__main__":
    main()
