"""Section `trained`: the divergence of recipes on SmolLM2, on the GPU and, as prepared, on a CPU.

    python benchmarks/gpu_trained.py FOLDER        # on any machine with the packages of the texts
    python benchmarks/gpu.py --trained FOLDER --sections trained

Four texts; a prompt of 2,048 tokens, and the divergence of the 128 tokens after it from an exact
cache of the same machine, in nats. On the GPU, steps are replayed by `kvloom.cuda_graphs`; of the
first text, also by steps that run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import kvloom
from gpu_clock import Bench
from kvloom_lab.eval.decoding import divergence

RECIPES = ("full", "near-lossless", "small", "tiny", "kivi")
PROMPT, NEW = 2_048, 128
_MODEL, _IDS, _CPU = "model.gguf", "ids.pt", "cpu.json"


def prepare(folder: Path) -> None:
    """Write the model, the texts' token ids, and the divergences on this machine's CPU."""
    import evidence_texts as texts
    from kvloom_lab.models import load_config_and_tokenizer, smollm2

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(smollm2._source(), folder / _MODEL)
    _, tokenizer = load_config_and_tokenizer("smollm2")
    kinds = {"prose": texts.prose, "code": texts.code, "documentation": texts.documentation}
    ids = {}
    for kind, text in {**kinds, "data": texts.data}.items():
        whole = tokenizer(text()[:200_000], return_tensors="pt").input_ids
        ids[kind] = whole[:, 4_000 : 4_000 + PROMPT + NEW].clone()
    torch.save(ids, folder / _IDS)
    model, found = _model(folder, torch.device("cpu")), {}
    exact = _exact(model, ids)
    for recipe in RECIPES:
        found[recipe] = _divergence(
            model, ids, exact, lambda recipe=recipe: kvloom.Cache(model, recipe)
        )
        print(recipe, found[recipe], flush=True)
    (folder / _CPU).write_text(json.dumps(found, indent=1) + "\n")


def trained(bench: Bench, folder: Path) -> None:
    """One row a recipe."""
    model, ids = _model(folder, bench.device), torch.load(folder / _IDS)
    ids = {kind: x.to(bench.device) for kind, x in ids.items()}
    first = dict(list(ids.items())[:1])
    on_cpu, exact = json.loads((folder / _CPU).read_text()), _exact(model, ids)
    for recipe in RECIPES:
        with bench.guarded(recipe):

            def cache(recipe: str = recipe) -> Any:
                return kvloom.Cache(model, recipe)

            replayed = _divergence(model, ids, exact, cache, kvloom.cuda_graphs(model))
            ran = _divergence(model, first, exact, cache)
            (kind,) = first
            figures = {
                "KL": _mean(replayed), "KL on a CPU": _mean(on_cpu[recipe]),
                f"{kind}: replayed": replayed[kind], f"{kind}: run": ran[kind],
                f"{kind}: on a CPU": on_cpu[recipe][kind],
            }  # fmt: skip
            bench.row(recipe, figures)


def _mean(by_text: dict[str, float]) -> float:
    return sum(by_text.values()) / len(by_text)


def _model(folder: Path, device: torch.device) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_MODEL, dtype=torch.float32)
    return loaded.to(torch.bfloat16).to(device).eval()


@torch.inference_mode()
def _exact(model: Any, ids: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits of an exact cache, by text."""
    return {kind: _logits(model, text, DynamicCache()) for kind, text in ids.items()}


@torch.inference_mode()
def _divergence(
    model: Any,
    ids: dict[str, Tensor],
    exact: dict[str, Tensor],
    cache: Callable[[], Any],
    replays: AbstractContextManager[None] | None = None,
) -> dict[str, float]:
    """Return the mean divergence from an exact cache, by text."""
    found = {}
    with replays or nullcontext():
        for kind, text in ids.items():
            got = _logits(model, text, cache())
            p, q = exact[kind].log_softmax(dim=-1), got.log_softmax(dim=-1)
            found[kind] = float(divergence(p[None], q[None]).mean())
    return found


def _logits(model: Any, text: Tensor, cache: Any) -> Tensor:
    """Return the logits of the tokens after the prompt, which are read one by one."""
    place = torch.arange(PROMPT + NEW, device=text.device)[None]

    def read(begin: int, end: int) -> Tensor:
        ids, where = text[:, begin:end], place[:, begin:end]
        out = model(ids, position_ids=where, past_key_values=cache, logits_to_keep=1)
        return out.logits[:, -1].float()

    read(0, PROMPT)
    return torch.cat([read(i, i + 1) for i in range(PROMPT, PROMPT + NEW)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    prepare(parser.parse_args().folder)
