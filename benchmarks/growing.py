"""Eviction while a text grows: divergence and bytes of `small` with and without blocks.

SmolLM2-135M-Instruct in bfloat16, one thread, reads prose that no recipe was chosen on:

- page: 768 tokens, and then 1,280 more in steps of 16, at two places;
- long: 192 tokens, and then 8,000 more in steps of 8, up to the model's last position;
- chat: a first turn of 60 tokens, nine of 400 at once, and 160 more after each, in steps of 8.

Divergences are from the exact cache `full`, of every token after the first step. Bytes are those
held: as a share of the exact cache's at the end and on average over the steps, and as they grow,
about every 64 tokens. Each row is written when it is finished; a run with the same protocol
continues the file. docs/growing_chart.py draws it.

    python benchmarks/growing.py
    python benchmarks/growing.py --workloads chat
"""

from __future__ import annotations

import json
from itertools import pairwise

import torch

import kvloom
import protocol
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
EVERY = 64  # tokens between two points of the bytes as they grow
SIZED = {"page": 512, "long": 1024, "chat": 1024}  # tokens of recipes with a fixed budget
UNFITTED = (
    "rotated:fraction=0.4,recent=64,head_share=0.2,layers=joint,block=512,store=near-lossless"
)


def recipes(tokens: int) -> list[str]:
    """Return the recipes, `full` first; those with a fixed budget keep so many tokens."""
    return [
        "full", "near-lossless", "small", "small:block=512", "small:block=256", "tiny",
        "tiny:block=512", "micro:block=512", f"streaming:tokens={tokens}", f"h2o:tokens={tokens}",
        UNFITTED, "triattention:fraction=0.25,recent=128,block=128",
    ]  # fmt: skip


@torch.inference_mode()
def read(
    model: torch.nn.Module, recipe: Recipe, ids: torch.Tensor, steps: list[int]
) -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
    """Return the log-probabilities [t, V] of each step after the first, and the sizes after each.

    Sizes are tokens read, bytes held, and those of an exact cache.
    """
    cache, log_probs, sizes = kvloom.Cache(model, recipe), [], []
    for i, step in enumerate(ids.split(steps, dim=1)):
        logits = model(step, past_key_values=cache, logits_to_keep=0 if i else 1).logits[0]
        if i:
            log_probs.append(logits.float().log_softmax(dim=-1))
        sizes.append((sum(steps[: i + 1]), cache.nbytes, cache.full_nbytes))
    return log_probs, sizes


def figures(
    exact: list[torch.Tensor], found: list[torch.Tensor], sizes: list[tuple[int, int, int]]
) -> dict[str, float | list[float]]:
    """Return the figures of a row, from what `read` returns; exact: the one of `full`."""
    pairs = list(zip(exact, found, strict=True))
    kl = torch.cat([divergence(p[None], q[None])[0] for p, q in pairs])
    same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in pairs])
    shares = [held / full for _, held, full in sizes[1:]]
    passed = [b for a, b in pairwise(sizes) if a[0] // EVERY < b[0] // EVERY]
    points = [sizes[0], *passed]
    return {
        "kl_mean": kl.mean().item(),
        "kl_p99": kl.quantile(0.99).item(),
        "agreement": same.float().mean().item(),
        "kl_by_fifth": [part.mean().item() for part in kl.chunk(5)],
        "bytes_end": shares[-1],
        "bytes_mean": sum(shares) / len(shares),
        "tokens": [tokens for tokens, _, _ in points],
        "nbytes": [held for _, held, _ in points],
    }


def main() -> None:
    options = record.options(__doc__, workloads=list(WORKLOADS))
    torch.set_num_threads(1)
    model, tokenizer = load("smollm2", "bfloat16")
    text = prose()
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    every = [resolve(name) for tokens in SIZED.values() for name in recipes(tokens)]
    frozen = protocol.protocol_of(
        {}, every, workloads=WORKLOADS, text=protocol.sha256(text), dtype="bfloat16"
    )
    frozen = json.loads(json.dumps(frozen))
    path = record.results() / "growing.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = before["rows"] if before.get("protocol") == frozen else []
    for workload in options.workloads:
        starts, steps = WORKLOADS[workload]
        for start in starts:
            part, exact = ids[:, start : start + sum(steps)], None
            for name in recipes(SIZED[workload]):
                row = {"workload": workload, "start": start, "recipe": name}
                if any(row.items() <= done.items() for done in rows):
                    continue
                exact = exact or read(model, resolve("full"), part, steps)
                found, sizes = exact if name == "full" else read(model, resolve(name), part, steps)
                row |= figures(exact[0], found, sizes)
                rows.append(row)
                print(
                    f"{workload} {start:>7} {name:<36} KL {row['kl_mean']:.4f}, 99% "
                    f"{row['kl_p99']:.3f}, bytes {row['bytes_end']:.1%} at the end, "
                    f"{row['bytes_mean']:.1%} on average",
                    flush=True,
                )
                record.write("growing", {"protocol": frozen, "rows": rows})


if __name__ == "__main__":
    main()
