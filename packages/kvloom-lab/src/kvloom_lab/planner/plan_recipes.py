"""`plan`: bytes, limits and speed of recipes on a model, before anything runs.

Decides the order of its steps and the settings that it refuses; other modules have the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from kvloom.errors import InputError
from kvloom.progress import Progress
from kvloom.recipe import Geometry, Recipe, resolve

from . import machine_file, machine_measurement
from .cache_bytes import CacheBytes
from .decode_step import StepWork, step_work
from .hardware import Hardware
from .hardware_file import read_file
from .machine import Machine
from .model import ModelFacts, read_model
from .plan_warnings import plan_warnings
from .presets import PRESETS
from .recipe_figures import CONTEXT, RecipePlanner, fitting_cache
from .result import Plan
from .units import show_bytes

THIS = "this"
RECIPES = (
    "full", "near-lossless", "balanced", "small", "tiny", "kivi", "skvq", "turbo", "minikv", "h2o",
    "snapkv", "streaming", "clusterkv", "quest",
)  # fmt: skip


def plan(
    model: str | Path | PreTrainedConfig,
    recipes: Sequence[Recipe | str | Path] = RECIPES,
    *,
    context: int | None = None,
    batch: int = 1,
    memory: int | None = None,
    hardware: str | Path | Hardware | None = None,
    target: float | None = None,
    on_step: Callable[[int], Progress] | None = None,
) -> Plan:
    """Return bytes, limits and decode times of recipes on a model, without running it.

    Args:
        model: A folder, a config file, a hub id, "reference", "smollm2", or a config; see
            `planner.model.read_model`.
        recipes: Recipes, their names or their files. One that does not fit the model has a row with
            the problem.
        context: Tokens (default: 32,768, or the model's positions if they are fewer).
        batch: Rows.
        memory: Bytes (default: the hardware's).
        hardware: A name in `planner.presets.PRESETS` such as "h100", "this" (measures this machine,
            and stores the result), a TOML file, or a `Hardware`.
        target: Tokens per second of the whole batch.
        on_step: Called with the number of units to measure; returns the function to report them to.

    Raises:
        InputError: The weights need more memory, or a setting is out of range.
        UnsupportedModel: The model cannot be counted.
        RecipeError: There is no such recipe.
    """
    _check_settings(context, batch, memory, hardware, target)
    chosen = [resolve(recipe) for recipe in recipes]
    device: Hardware | Machine | None = None
    if hardware is not None and hardware != THIS:
        device = _hardware(hardware)
    facts = read_model(model)
    context = context or min(CONTEXT, facts.positions or CONTEXT)
    caches = [fitting_cache(recipe, facts, context) for recipe in chosen]
    if hardware == THIS:
        _check_memory(facts, memory or machine_measurement.total_memory())
        works = [step_work(facts, x, context, batch) for x in caches if isinstance(x, CacheBytes)]
        device = _this_machine(facts.geometry, works, on_step)
    memory = memory or (None if device is None else device.memory)
    if memory is not None:
        _check_memory(facts, memory)
    planner = RecipePlanner(facts, context, batch, memory, device, target)
    rows = tuple(planner.row(*each) for each in zip(chosen, caches, strict=True))
    warnings = tuple(plan_warnings(planner, rows))
    return Plan(facts, context, batch, memory, device, target, rows, warnings)


def _check_settings(
    context: int | None, batch: int, memory: int | None, hardware: object, target: float | None
) -> None:
    for name, value in (("context", context), ("batch", batch), ("memory", memory)):
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name}={value!r} must be a whole number, 1 or more")
    if target is not None and not target > 0:
        raise InputError(f"target={target!r} must be a number of tokens per second above 0")
    if target is not None and hardware is None:
        raise InputError(
            f"a target speed needs hardware: give {', '.join(PRESETS)}, {THIS}, or a hardware file"
        )


def _this_machine(
    geometry: Geometry, works: Sequence[StepWork], on_step: Callable[[int], Progress] | None
) -> Machine:
    """Return this machine with the rates that these steps need; measure and store new ones."""
    machine = machine_file.load()
    units = machine_measurement.units(machine, works, geometry)
    if machine is None or units:
        report = on_step(units) if on_step else (lambda what, done: None)
        machine = machine_measurement.complete(machine, works, geometry, report)
        machine_file.save(machine)
    return machine


def _hardware(hardware: str | Path | Hardware) -> Hardware:
    """Return a preset, or the hardware of a file."""
    if isinstance(hardware, Hardware):
        return hardware
    if str(hardware) in PRESETS:
        return PRESETS[str(hardware)]
    if Path(hardware).is_file():
        return read_file(Path(hardware))
    raise InputError(
        f"hardware {str(hardware)!r} is unknown; use {', '.join(PRESETS)}, {THIS}, or the path of "
        "a hardware file"
    )


def _check_memory(facts: ModelFacts, memory: int) -> None:
    if memory < facts.weights.nbytes:
        raise InputError(
            f"the weights of {facts.name} take {show_bytes(facts.weights.nbytes)}, and there are "
            f"{show_bytes(memory)} of memory; give more memory, or a model with fewer or quantized "
            "weights"
        )
