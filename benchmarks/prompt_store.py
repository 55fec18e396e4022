"""A prompt store: wrong answers, the time of loading, looking up and storing, and what it saves.

The ladder asks 38 needle prompts of the reference model with the store off, cold, warm, in a new
process, after kill -9 of a writer, and after another tenant. An answer must be the recipe's own,
bit for bit: that of the same two calls without a store. Answers of one call are counted, too. Eight
processes share a store for five minutes. The times are of SmolLM2 in bfloat16. The trace is
simulated: questions are about documents whose frequencies follow Zipf's law. A store of 200 MiB
holds the last used ones, whose bytes are those that the recipe predicts.

    python benchmarks/prompt_store.py [--parts ladder] [--recipes near-lossless] [--tokens 1024]

Figures of parts and recipes that are not measured again stay in the file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

import kvloom
import kvloom_lab
import record
from kvloom.hf import geometry
from kvloom.hf.prompts import identity
from kvloom.hf.prompts.folder import INDEX
from kvloom.recipe import resolve
from kvloom_lab.models import load
from kvloom_lab.workload.text import library_text

DTYPE = "bfloat16"  # of SmolLM2
BLOCK, PROMPTS, BLOCKS, LOOK_UPS, SECONDS = 64, 38, 100_000, 2_000, 300
STORE, DOCUMENTS, REQUESTS = 200 << 20, 400, 20_000


def needle_prompts() -> list[torch.Tensor]:
    """Return prompts of about 1,000 tokens: a number to find in text, and the question for it."""
    tokenizer, text, draw = kvloom_lab.reference_tokenizer(), library_text(), random.Random(0)
    prompts = []
    for _ in range(PROMPTS):
        begin, number = draw.randrange(len(text) - 4000), draw.randrange(10**6)
        context = text[begin : begin + draw.randrange(2000, 3500)]
        place = draw.randrange(len(context))
        needle = f"\nMAGIC_NUMBER = {number}\n"
        whole = f"{context[:place]}{needle}{context[place:]}\nassert MAGIC_NUMBER == "
        prompts.append(tokenizer(whole, return_tensors="pt")["input_ids"])
    return prompts


def answers(recipe: str, store: kvloom.PromptStore | None, calls: int = 1) -> list[torch.Tensor]:
    """Return the answers to all prompts. calls: without a store, in how many a prompt is read."""
    model, found = kvloom_lab.reference_model(), []
    kvloom.attach(model, recipe, store=store)
    for ids in needle_prompts():
        cache = kvloom.Cache(model, recipe) if store is None else None
        if cache is not None and calls == 2:
            with torch.no_grad():
                model(ids[:, : (ids.shape[1] - 1) // BLOCK * BLOCK], past_key_values=cache)
        options = {} if cache is None else {"past_key_values": cache}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            output_logits=True, return_dict_in_generate=True, **options,
        )  # fmt: skip
        found.append(torch.stack(out.logits))
    return found


def rung(folder: Path, recipe: str, tenant: str, kills: bool = False) -> list[torch.Tensor]:
    """Return the answers of a new process; kills: of one after a writer that was killed."""
    command = [sys.executable, __file__, "--worker", str(folder), recipe, tenant]
    if kills:
        before = len(list(folder.glob("*.safetensors")))
        writer = subprocess.Popen([*command, "write"])
        while len(list(folder.glob("*.safetensors"))) < before + 5:
            time.sleep(0.01)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    subprocess.run(command, check=True)
    return torch.load(f"{folder}.pt", weights_only=True)


def worker(folder: str, recipe: str, tenant: str, task: str = "answer") -> None:
    """Answer in this process, or store random prompts until it is killed."""
    if task.startswith("compare"):
        compare(Path(folder), recipe, int(task.split()[1]))
        return
    store = kvloom.PromptStore(folder, tenant=tenant)
    if task == "answer":
        torch.save(answers(recipe, store), f"{folder}.pt")
        print(f"{recipe}: {store.report()}", flush=True)
        return
    model = kvloom_lab.reference_model()
    kvloom.attach(model, recipe, store=store)
    while True:
        model.generate(torch.randint(3, 4000, (1, 900)), max_new_tokens=1)


def ladder(recipe: str) -> dict:
    """Return how many answers of each rung differ from the recipe's own."""
    own, one_call = answers(recipe, None, 2), answers(recipe, None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "store"
        store = kvloom.PromptStore(folder)
        rungs = {"off": answers(recipe, None, 2), "cold": answers(recipe, store)}
        rungs["warm"] = answers(recipe, store)
        report = str(store.report())
        rungs["new process"] = rung(folder, recipe, "")
        rungs["after kill -9"] = rung(folder, recipe, "", kills=True)
        rungs["after another tenant"] = rung(folder, recipe, "other")
        damaged = kvloom.PromptStore(folder).verify()

    def differ(found: list[torch.Tensor], expected: list[torch.Tensor], tokens: bool) -> int:
        pairs = zip(found, expected, strict=True)
        if tokens:
            pairs = ((x.argmax(-1), y.argmax(-1)) for x, y in pairs)
        return sum(not torch.equal(x, y) for x, y in pairs)

    row = {
        "recipe": recipe, "prompts": PROMPTS, "answers": PROMPTS * len(rungs),
        "logits_differ": {name: differ(found, own, False) for name, found in rungs.items()},
        "answers_differ": sum(differ(found, own, True) for found in rungs.values()),
        "one_call_answers_differ": differ(one_call, own, True),
        "damaged": len(damaged), "report": report,
    }  # fmt: skip
    print(row, flush=True)
    return row


def processes(recipe: str) -> dict:
    """Return what went wrong where eight processes share a store with room for half of the prompts.

    Each answers short prompts in an order of its own, and compares each answer with the recipe's.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "store"
        command = [sys.executable, __file__, "--worker", str(folder), recipe, ""]
        started = [subprocess.Popen([*command, f"compare {number}"]) for number in range(8)]
        codes = [process.wait(timeout=4 * SECONDS) for process in started]
        lines = [json.loads(path.read_text()) for path in Path(place).glob("compared-*.json")]
        store = kvloom.PromptStore(folder)
        damaged, rows = len(store.verify()), {entry.key for entry in store.entries()}
        names = {path.stem for path in folder.glob("*.safetensors")}
        left = len(list(folder.glob(".*"))) + len(list(folder.glob("*.damaged")))
    row = {
        "recipe": recipe, "processes": 8, "seconds": SECONDS, "exit_codes": codes,
        "damaged": damaged, "files_without_rows": len(names - rows), "left_over": left,
        "rows_without_files": len(rows - names),
        **{name: sum(line[name] for line in lines) for name in ("answers", "wrong", "reused")},
    }  # fmt: skip
    print(row, flush=True)
    return row


def compare(folder: Path, recipe: str, number: int) -> None:
    """Answer prompts for `SECONDS`, and write how many answers were not the recipe's own."""
    model, draw, answered, wrong = kvloom_lab.reference_model(), random.Random(number), 0, 0
    prompts = [ids[:, :300] for ids in needle_prompts()[:16]]

    def logits(ids: torch.Tensor) -> torch.Tensor:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(out.logits)

    alone = kvloom.PromptStore(folder.parent / f"alone-{number}")
    kvloom.attach(model, recipe, store=alone)
    expected = [logits(ids) for ids in prompts]
    store = kvloom.PromptStore(folder, max_bytes=alone.report().nbytes // 2)
    kvloom.attach(model, recipe, store=store)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        i = draw.randrange(len(prompts))
        wrong += not torch.equal(logits(prompts[i]), expected[i])
        answered += 1
    row = {"answers": answered, "wrong": wrong, "reused": store.report().reused}
    (folder.parent / f"compared-{number}.json").write_text(json.dumps(row))


def seconds(fn) -> dict:
    """Return the wall time and the processor time of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    fn()
    return {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def times(recipe: str, tokens: int, repeats: int = 3) -> dict:
    """Return the times to read, store and load a prefix of SmolLM2."""
    model, tokenizer = load("smollm2", DTYPE)
    ids = tokenizer(library_text()[: 8 * tokens], return_tensors="pt")["input_ids"][:, : tokens + 1]
    rows: dict[str, list] = {"prefill": [], "put": [], "load": []}
    with tempfile.TemporaryDirectory() as folder:
        first_identity = seconds(lambda: identity.seed(kvloom.Cache(model, recipe), ""))
        for number in range(repeats):
            store = kvloom.PromptStore(folder, tenant=str(number))
            cache = kvloom.Cache(model, recipe)

            def prefill(cache=cache) -> None:
                with torch.no_grad():
                    model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)

            rows["prefill"].append(seconds(prefill))
            rows["put"].append(seconds(lambda s=store, c=cache: s.put(c, ids[:, :tokens])))
            assert store.longest(model, recipe, ids)[1] == tokens
            rows["load"].append(seconds(lambda s=store: s.longest(model, recipe, ids)))
            print(recipe, {name: x[-1] for name, x in rows.items()}, flush=True)
        nbytes = store.entries()[0].nbytes
    best = {name: {unit: min(x[unit] for x in xs) for unit in xs[0]} for name, xs in rows.items()}
    return {
        "recipe": recipe, "tokens": tokens, "nbytes": nbytes, "repeats": repeats,
        "first_identity": first_identity, "best": best, "all": rows,
        "load_is_faster": best["prefill"]["s"] / best["load"]["s"],
        "load_is_faster_cpu": best["prefill"]["cpu_s"] / best["load"]["cpu_s"],
        "put_share": best["put"]["s"] / best["prefill"]["s"],
        "put_share_cpu": best["put"]["cpu_s"] / best["prefill"]["cpu_s"],
    }  # fmt: skip


def look_ups() -> dict:
    """Return the time to find the longest entry of a prompt of 4,096 tokens among many blocks."""
    draw = random.Random(0)
    chains = [[draw.randbytes(32) for _ in range(64)] for _ in range(BLOCKS // 64 + 1)]
    with tempfile.TemporaryDirectory() as folder:
        store = kvloom.PromptStore(folder)
        db = sqlite3.connect(Path(folder) / INDEX)
        rows = [
            (key, 64, 4096, 0.0, float(i), "M", "full") for c in chains for i, key in enumerate(c)
        ]
        db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        db.executemany("INSERT INTO seen (digest) VALUES (?)", [(row[0],) for row in rows])
        db.commit()
        walls, cpus = [], []
        for number in range(LOOK_UPS):
            own = draw.choice(chains)[: draw.randrange(65)]
            chain = own + [draw.randbytes(32) for _ in range(64 - len(own))]
            wall, cpu = time.perf_counter(), time.process_time()
            found = store.index.longest(chain), store.index.last_seen(chain)
            walls.append(1e3 * (time.perf_counter() - wall))
            cpus.append(1e3 * (time.process_time() - cpu))
            assert found == (len(own), len(own)), number
    figures = {"blocks": len(rows), "look_ups": LOOK_UPS}
    for name, x in (("ms", walls), ("cpu_ms", cpus)):
        figures |= {
            f"{name}_p50": float(np.percentile(x, 50)),
            f"{name}_p99": float(np.percentile(x, 99)),
        }
    print(figures, flush=True)
    return figures


def trace(recipe: str) -> dict:
    """Return the share of prefill tokens that a store of 200 MiB saves, by simulation."""
    shape = geometry(load("smollm2", DTYPE)[0])
    draw = np.random.default_rng(0)
    lengths = draw.integers(8, 65, DOCUMENTS) * BLOCK  # 512 to 4,096 tokens
    sizes = {int(x): resolve(recipe).nbytes(int(x), shape) for x in set(lengths)}
    weights = 1 / np.arange(1, DOCUMENTS + 1)
    held: OrderedDict[int, int] = OrderedDict()
    given = saved = 0
    for document in draw.choice(DOCUMENTS, REQUESTS, p=weights / weights.sum()):
        tokens = int(lengths[document])
        given += tokens
        if document in held:
            saved += tokens
            held.move_to_end(document)
            continue
        held[document] = sizes[tokens]
        while sum(held.values()) > STORE:
            held.popitem(last=False)
    row = {"recipe": recipe, "tokens": given, "saved": saved, "share": saved / given,
           "documents_held": len(held)}  # fmt: skip
    print(row, flush=True)
    return row


def main() -> None:
    parts = {
        "ladder": lambda recipe, _: ladder(recipe),
        "processes": lambda recipe, _: processes(recipe),
        "look_ups": lambda *_: look_ups(),
        "trace": lambda recipe, _: trace(recipe),
        "times": times,
    }
    recipes = ["near-lossless", "small", "full"]
    options = record.options(__doc__, parts=list(parts), recipes=recipes, tokens=4096)
    environment = record.environment(dtype=DTYPE, load_average=os.getloadavg()[0])
    measured = {
        part: [
            {"recipe": recipe, **parts[part](recipe, options.tokens), "environment": environment}
            for recipe in (options.recipes if part != "look_ups" else [""])
        ]
        for part in options.parts
    }
    path = record.results() / "prompt_store.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    for part, rows in measured.items():
        former = {x["recipe"]: x for x in figures.get(part, ())}
        figures[part] = list((former | {x["recipe"]: x for x in rows}).values())
    record.write("prompt_store", figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
