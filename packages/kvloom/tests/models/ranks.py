"""What each of two processes does with its part of a model; `test_tensor_parallel` runs it.

Takes the folder that the test has filled, and leaves there what each rank found, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import kvloom
import kvloom_lab
import probe
from kvloom.calibrate import calibrate

RANKS = 2
NEW = {"trained": 8, "random": 8}
RECORDED = hasattr(DistributedConfig, "tp_size")
"""Whether weights know how they were divided: in 5.23, but not yet in 5.10."""
CALIBRATED = ["skvq:span=head,group=32,calibration=", "smoothquant:calibration="]
RECIPES = {
    "trained": [
        "full", "near-lossless", "minikv", "h2o:fraction=0.3", *CALIBRATED * RECORDED,
    ],
    "random": [
        "full", "kivi", "near-lossless", "snapkv:tokens=100,window=16",
        "pyramidkv:fraction=0.5", "keyformer", "random", "kvzip:fraction=0.5",
        "expected:fraction=0.5", "h2o:shared=true", "quest:tokens=96", "clusterkv:tokens=96",
    ],
    "beams": ["near-lossless", "keyformer:fraction=0.3"],
}  # fmt: skip
ARCHITECTURES = ("qwen2", "qwen3", "phi3", "gemma2", "gemma3", "glm4")
"""Of `zoo`; every rank holds all heads of Phi-3."""
UNEVEN = {"mqa": (4, 1), "three": (6, 3)}
"""Query and key/value heads that two ranks cannot divide."""


def load(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def generate(model: Any, cache: Any, ids: list[int], new: int) -> list[int]:
    prompt = torch.tensor([ids])
    out = model.generate(prompt, past_key_values=cache, max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


def kept(cache: kvloom.Cache) -> list[list[int]]:
    """Return a number for the tokens that each head keeps, by layer and head."""
    return [
        (probe.kept(layer)[0] * 7919 % 10007).sum(dim=-1).tolist() for layer in probe.layers(cache)
    ]


def of_recipe(model: Any, recipe: str, ids: list[int], new: int) -> dict[str, Any]:
    cache = kvloom.Cache(model, recipe)
    evicts = cache.recipe.keep is not None
    if evicts:
        probe.observe(cache)
    tokens = generate(model, cache, ids, new)
    return {
        "tokens": tokens,
        "kept": kept(cache) if evicts else [],
        "nbytes": cache.nbytes,
        "heads": [probe.shape(layer)[1] for layer in probe.layers(cache)],
        "predicted": cache.recipe.nbytes(len(ids), cache.geometry),
    }


def beams(model: Any, recipe: str, ids: list[int]) -> list[list[int]]:
    """Return the new tokens of two rows, one of them padded, by three beams."""
    rows, mask = torch.tensor([ids[:80], [0] * 25 + ids[100:155]]), torch.ones(2, 80).long()
    mask[1, :25] = 0
    options = {"num_beams": 3, "max_new_tokens": 10, "past_key_values": kvloom.Cache(model, recipe)}
    return model.generate(rows, attention_mask=mask, do_sample=False, **options)[:, 80:].tolist()


def of_models(folder: Path, models: dict[str, Any], ids: dict[str, list[int]]) -> dict[str, Any]:
    """Return what each recipe gives, by model and recipe, in one process or in one of several."""
    at = folder / "calibration.kvcal"
    found: dict[str, Any] = {
        name: {
            recipe: of_recipe(
                models[name], recipe.replace("calibration=", f"calibration={at}"), ids[name], new
            )
            for recipe in RECIPES[name]
        }
        for name, new in NEW.items()
    }
    for name in ARCHITECTURES:
        found[name] = {"near-lossless": of_recipe(models[name], "near-lossless", ids["random"], 8)}
    found["beams"] = {
        recipe: beams(models["random"], recipe, ids["random"]) for recipe in RECIPES["beams"]
    }
    return found


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saved_and_loaded(
    model: Any, recipe: str, ids: list[int], folder: Path, rank: int
) -> dict[str, Any]:
    """Return tokens after a prefix: from the cache, and from the file that this rank saved."""
    cache, name = kvloom.Cache(model, recipe), recipe.partition(":")[0]
    ids = ids + generate(model, cache, ids, 8)
    path = folder / f"{name}.rank{rank}.kv"
    cache.save(path)
    on, again = (generate(model, c, ids, 8) for c in (cache, kvloom.Cache.load(model, path)))
    dist.barrier()
    other = folder / f"{name}.rank{1 - rank}.kv"
    return {"on": on, "again": again, "other": refusal(lambda: kvloom.Cache.load(model, other))}


def refusals(folder: Path, models: dict[str, Any], ids: list[int]) -> dict[str, str]:
    """Return the errors of what a part of a model cannot do."""
    model, trained = models["random"], models["trained"]
    kvloom.detach(model)
    kvloom.detach(trained)
    skvq = f"skvq:group=64,calibration={folder}/calibration.kvcal"
    found = {
        "skvq": refusal(lambda: kvloom.attach(trained, skvq)),
        "variance": refusal(lambda: kvloom.attach(model, "snapkv:fraction=0.5,layers=variance")),
        "auto": refusal(lambda: kvloom_lab.auto(model, share=0.5)),
        "whole": refusal(lambda: kvloom.Cache.load(model, folder / "whole.kv")),
        "calibrate": refusal(
            lambda: calibrate(trained, torch.tensor([ids]), [], folder / "no.kvcal")
        ),
    }
    for name in UNEVEN:
        found[name] = refusal(lambda name=name: kvloom.attach(models[name], "kivi"))
    found["by other code"] = refusal(lambda: divided_by_torch(folder / "random"))
    routed = [name for name in ("random", "trained", *UNEVEN) if hasattr(models[name], "_kvloom")]
    return {**found, "routed": " ".join(routed)}


def divided_by_torch(path: Path) -> None:
    """Generate with a model whose attention torch divides, and not transformers."""
    model = load(path)
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    for layer in model.model.layers:
        mesh = init_device_mesh("cpu", (RANKS,))
        parallelize_module(layer.self_attn, mesh, {**plan, "o_proj": RowwiseParallel()})
    kvloom.attach(model, "kivi")
    generate(model, None, [5] * 20, 2)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ids = json.loads((folder / "ids.json").read_text())
    names = (*NEW, *ARCHITECTURES, *UNEVEN)
    models = {name: load(folder / name, tp_plan="auto") for name in names}
    rank = dist.get_rank()
    found = {
        "recipes": of_models(folder, models, ids),
        "saved": {
            recipe: saved_and_loaded(models["random"], recipe, ids["random"], folder, rank)
            for recipe in ("near-lossless", "keyformer", "clusterkv:tokens=96")
        },
        "refused": refusals(folder, models, ids["trained"]),
    }
    if RECORDED:
        config = DistributedConfig(tp_size=RANKS)
        model = load(folder / "random", distributed_config=config)
        found["config"] = of_recipe(model, "kivi", ids["random"], NEW["random"])
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
