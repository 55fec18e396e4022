"""Saved caches that were changed and given the checksum of what they now hold.

A checksum detects damage, not a deliberate change. A forged file may be refused, fail in a
step, or give other logits. Loading it and stepping may not end the process, hang, or need much more
memory than the file has bytes. Each case runs in a fork.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch
import zoo
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

import kvloom
from kvloom.errors import KvloomError
from kvloom.kernels import dispatch
from kvloom.store import files
from limits import limited

from .faults import RECIPES
from .tally import Tally

CASES, ROOM, LIMIT_S = 10_000, 1 << 30, 60
NUMBERS = [-1, 0, 1, 2**31, 2**40, 2**62, -(2**40), 0.5, None, "text", [], True]
KERNELS_S = 300  # seconds of a budget from which cases run by kernels, which compile first


def run_all(tally: Tally) -> None:
    """Forge files of every recipe."""
    model = zoo.build("llama-gqa", head_dim=32)
    outcomes: Counter[str] = Counter()
    backend = "auto" if tally.seconds > KERNELS_S else "ref"
    with tempfile.TemporaryDirectory() as folder, dispatch.use(backend):
        paths = []
        for number, recipe in enumerate(RECIPES):
            cache = kvloom.Cache(model, recipe)
            with torch.no_grad():
                model(**zoo.batch(2, 90, (0, 17)), past_key_values=cache)
            paths.append(Path(folder) / f"{number}.kv")
            cache.save(paths[-1])
            use(model, paths[-1])
        for seed in tally.numbers(CASES):
            draw = Random(seed)
            path = Path(folder) / "forged.kv"
            forge(draw.choice(paths), path, draw)
            with tally.case(f"forged {seed}"):
                outcomes[in_fork(model, path)] += 1
    tally.figures["outcomes"] = dict(outcomes)


def use(model: PreTrainedModel, path: Path) -> None:
    """Load a cache, and run a few steps."""
    cache = kvloom.Cache.load(model, path)
    mask = zoo.batch(2, 120, (0, 17))["attention_mask"]
    with torch.no_grad():
        for begin, end in ((90, 91), (91, 110), (110, 111), (111, 112)):
            ids = torch.full((2, end - begin), 7)
            model(ids, attention_mask=mask[:, :end], past_key_values=cache)


def in_fork(model: PreTrainedModel, path: Path) -> str:
    """Use a file in a fork; return what became of it."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            with limited("AS", ROOM):
                use(model, path)
            status = 0
        except KvloomError:
            status = 1
        except MemoryError:
            status = 4
        except Exception as error:
            status = 4 if "allocate memory" in str(error) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    outcome = ["read", "refused", "another error", "an interrupt", "memory"][os.WEXITSTATUS(status)]
    assert outcome != "memory", "needs much more memory than the file has bytes"
    return outcome


def forge(source: Path, target: Path, draw: Random) -> None:
    """Write a copy in which one or two numbers, or a tensor, are others."""
    with safe_open(source, "pt") as file:
        about = json.loads(file.metadata()["kvloom_cache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors[files.CHECKSUM]
    for _ in range(draw.choice([1, 1, 2])):
        if draw.random() < 0.6:
            change_number(about["layers"], draw)
        else:
            name = draw.choice(sorted(tensors))
            tensors[name] = changed_tensor(tensors[name], draw)
    files.write(target, tensors, {"kvloom_cache": json.dumps(about)}, AssertionError)


def change_number(data: Any, draw: Random) -> None:
    """Change a leaf of nested data."""
    while True:
        keys = list(data) if isinstance(data, dict) else range(len(data))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(data[key], (dict, list)) or not data[key]:
            value = data[key]
            near = value + draw.choice([-1, 1]) if type(value) is int else value
            data[key] = draw.choice([*NUMBERS, near, near, near])
            return
        data = data[key]


def changed_tensor(x: Tensor, draw: Random) -> Tensor:
    """Return a tensor with other numbers, another shape or another dtype."""
    kind = draw.randrange(4)
    if kind == 0 or not x.numel():
        return x.new_zeros([max(0, n + draw.choice([-1, 0, 1])) for n in x.shape])
    if kind == 1:
        return x.to(draw.choice([torch.int64, torch.float32, torch.uint8, torch.float16]))
    x = x.clone()
    flat = x.view(-1)
    place = draw.randrange(flat.numel())
    if x.is_floating_point():
        flat[place] = draw.choice([float("nan"), float("inf"), -1e30, 0.0])
    elif x.dtype == torch.bool:
        flat[place] = ~flat[place]
    else:
        info = torch.iinfo(x.dtype)
        flat[place] = draw.choice([info.max, info.min, -1, 1_000, 90]) % (info.max + 1)
    return x
