"""What each of two processes does with its half of a model; run by `test_tensor_parallel`.

Takes a folder with models and a calibration, which the test has written, and leaves there what each
rank found, as JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import kvloom

NEW = 24
TRAINED = [
    "full", "kivi", "kivi-4", "near-lossless", "balanced", "minikv", "h2o", "clusterkv",
    "turbo", "skvq:span=head,group=64,calibration={folder}/head.kvcal",
    "smoothquant:calibration={folder}/head.kvcal",
]  # fmt: skip
RANDOM = [
    "full", "kivi", "near-lossless", "snapkv", "pyramidkv:fraction=0.5", "keyformer", "random", "kvzip", "expected",
    "h2o:shared=true", "quest:tokens=128", "clusterkv:tokens=128", "kitty:boost=8",
]  # fmt: skip


def load(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def generate(model: Any, cache: Any, ids: list[int], new: int = NEW) -> list[int]:
    prompt = torch.tensor([ids])
    out = model.generate(prompt, past_key_values=cache, max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


def of_recipes(model: Any, recipes: list[str], folder: Path, ids: list[int]) -> dict[str, Any]:
    """Return tokens, bytes, predicted bytes after the prompt and the heads of each recipe."""
    found = {}
    for recipe in recipes:
        cache = kvloom.Cache(model, recipe.format(folder=folder))
        tokens = generate(model, cache, ids)
        layer = cache.routed[0].cache
        found[recipe] = {"tokens": tokens, "nbytes": cache.nbytes, "heads": layer.like.shape[1]}
    return found


def refusal(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ids = json.loads((folder / "ids.json").read_text())
    trained = load(folder / "trained", tp_plan="auto")
    rank, found = dist.get_rank(), {}
    found["trained"] = of_recipes(trained, TRAINED, folder, ids["trained"])
    options: dict[str, Any] = {"tp_plan": "auto"}
    if "tp_size" in inspect.signature(DistributedConfig).parameters:
        options = {"distributed_config": DistributedConfig(tp_size=2)}
    model = load(folder / "random", **options)
    found["random"] = of_recipes(model, RANDOM, folder, ids["random"])
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
