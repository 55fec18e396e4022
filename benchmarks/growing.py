"""Eviction while a text grows: divergence and bytes of `small` with and without blocks.

SmolLM2-135M-Instruct in bfloat16, one thread, reads prose that no recipe was chosen on:

- page: 768 tokens, and then 1,280 more in steps of 16, at two places;
- long: 192 tokens, and then 8,000 more in steps of 8, up to the model's last position;
- chat: a first turn of 60 tokens, nine of 400 at once, and 160 more after each, in steps of 8.

Divergences are from the exact cache `full`, of every token after the first step; bytes are those
held, as a share of the exact cache's, at the end and on average over the steps.

    python benchmarks/growing.py
    python benchmarks/growing.py --workloads chat
"""

from __future__ import annotations

import torch

import kvloom
import record
from evidence import prose
from kvloom.recipe import Recipe, resolve
from kvloom_lab.eval.decoding import divergence
from kvloom_lab.models import load

LATER = [8] * 20
WORKLOADS = {  # where the text begins, in tokens, and the sizes of the steps
    "page": ((100_000, 400_000), [768] + [16] * 80),
    "long": ((100_000,), [192] + [8] * 1000),
    "chat": ((100_000,), [60, *LATER, *([400, *LATER] * 9)]),
}
SIZED = {"page": 512, "long": 1024, "chat": 1024}  # tokens of recipes with a fixed budget
UNFITTED = (
    "rotated:fraction=0.4,recent=64,head_share=0.2,layers=joint,block=256,store=near-lossless"
)


def recipes(tokens: int) -> list[str]:
    """Return the recipes; those with a fixed budget keep so many tokens."""
    return [
        "near-lossless", "small", "small:block=256", "small:block=128", UNFITTED,
        "small:fraction=0.25,block=256", "small:fraction=0.15,block=256",
        f"streaming:tokens={tokens}", f"h2o:tokens={tokens}",
        "triattention:fraction=0.25,recent=128,block=128",
    ]  # fmt: skip


@torch.inference_mode()
def read(
    model: torch.nn.Module, recipe: Recipe, ids: torch.Tensor, steps: list[int]
) -> tuple[torch.Tensor, list[float]]:
    """Return the log-probabilities [T, V] after the first step, and the bytes after each step."""
    cache, logs, sizes = kvloom.Cache(model, recipe), [], []
    for i, step in enumerate(ids[:, : sum(steps)].split(steps, dim=1)):
        logits = model(step, past_key_values=cache, logits_to_keep=0 if i else 1).logits[0]
        if i:
            logs.append(logits.float().log_softmax(dim=-1))
            sizes.append(cache.nbytes / cache.full_nbytes)
    return torch.cat(logs), sizes


def main() -> None:
    options = record.options(__doc__, workloads=list(WORKLOADS))
    torch.set_num_threads(1)
    model, tokenizer = load("smollm2", "bfloat16")
    ids, rows = tokenizer(prose(), return_tensors="pt", verbose=False).input_ids, []
    for workload in options.workloads:
        starts, steps = WORKLOADS[workload]
        for start in starts:
            text = ids[:, start : start + sum(steps)]
            exact, _ = read(model, resolve("full"), text, steps)
            for name in recipes(SIZED[workload]):
                found, sizes = read(model, resolve(name), text, steps)
                kl = divergence(exact[None], found[None])[0]
                row = {
                    "workload": workload, "start": start, "recipe": name,
                    "kl_mean": kl.mean().item(), "kl_p99": kl.quantile(0.99).item(),
                    "agreement": (exact.argmax(-1) == found.argmax(-1)).float().mean().item(),
                    "kl_by_fifth": [part.mean().item() for part in kl.chunk(5)],
                    "bytes_end": sizes[-1], "bytes_mean": sum(sizes) / len(sizes),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{workload} {start:>7} {name:<36} KL {row['kl_mean']:.4f}, 99% "
                    f"{row['kl_p99']:.3f}, bytes {row['bytes_end']:.1%} at the end, "
                    f"{row['bytes_mean']:.1%} on average",
                    flush=True,
                )
    record.write("growing", {"environment": record.environment(dtype="bfloat16"), "rows": rows})


if __name__ == "__main__":
    main()
