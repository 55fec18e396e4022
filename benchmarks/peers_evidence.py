"""Peers' own code on samples of the published evidence.

These are kvpress, transformers' QuantizedCache, llama.cpp and vLLM.

    pip install --no-deps kvpress optimum-quanto hqq    # and the packages that they import
    pip install llama-cpp-python gguf; make .venv-vllm/ready
    python benchmarks/peers_evidence.py --contexts 6    # an hour on one core; it can be resumed

Plain transformers reads each context with a press of kvpress, or into a QuantizedCache; llama.cpp
reads it with the same weights in bf16, and K and V in the format named. The tasks of the evaluator
then ask, decode and score as they do with kvloom's recipes. vLLM answers all questions in a process
of its own. The samples are those of a published run, whose answers the peers' are paired with: the
hash of all texts must be the same. DynamicCache is what peers are without compression; `full` is
kvloom's own attention.

Bytes are those of the tensors that a cache holds after the context; of llama.cpp, those that its
format takes for as many tokens, and of vLLM, their part of its pages. AdaKV and KVzip free nothing:
they hide entries, and hold the indices of these as well; `freed_share` is that of the others.
Presses have the settings of kvpress' board. Two things let kvpress run with this transformers,
which is newer than the versions that it names:

- The model gets `cache_position`, from which presses know that a pass reads a context.
- KVzip repeats the context in the tokenizer's chat template. These contexts have none, so it gets a
  tokenizer without one.

KVzap is not measured: there are no trained weights of it for this model.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any
from unittest import mock

if missing := [
    name
    for name in ("kvpress", "optimum-quanto", "hqq", "llama-cpp-python", "gguf")
    if not any(distributions(name=name))
]:
    sys.exit(f"not installed: {', '.join(missing)}; the docstring of {__file__} has the commands")

import kvpress
import torch
from torch import Tensor
from transformers import AutoTokenizer, Cache, DynamicCache, PreTrainedModel, QuantizedCache

import protocol
import record
from evaluation import HERE
from evidence import DTYPE, Lab
from evidence_figures import over
from evidence_tables import peers, published_samples
from kvloom.recipe import resolve
from kvloom_lab.eval.decoding import before_stop, stop_ids
from kvloom_lab.eval.results import ResultFolder
from kvloom_lab.eval.sample import Batch, Run, Sample, Source
from kvloom_lab.eval.summary import summarize
from kvloom_lab.eval.tasks import task_named
from kvloom_lab.models import located
from kvloom_lab.workload.passes import Measurement, Result

sys.path.append(str(HERE / "peers"))
from llama_cpp_cache import LlamaCache, LlamaModel

RUN = "smollm2-2k-mixed"
SPEC, TASK = "niah:multikey", task_named("niah:multikey")
EXACT = "DynamicCache"
PRESSES = {
    f"{name} {share}": press
    for share, ratio in (("1/4", 3 / 4), ("1/7", 6 / 7))
    for name, press in {
        "SnapKV": kvpress.SnapKVPress(ratio),
        "ExpectedAttention": kvpress.ExpectedAttentionPress(ratio),
        "AdaKV(SnapKV)": kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
        "AdaKV(ExpectedAttention)": kvpress.AdaKVPress(
            kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2)
        ),
        "KVzip": kvpress.KVzipPress(ratio),
    }.items()
}
QUANTIZED = {
    f"QuantizedCache {backend}, {bits} bits": {
        "backend": backend, "nbits": bits, "axis_key": axis, "axis_value": axis,
    }
    for bits in (4, 2)
    for backend, axis in (("quanto", 0), ("hqq", 1))
}  # fmt: skip
LLAMA = {f"llama.cpp {kind}": kind for kind in ("f16", "q8_0", "q4_0")}
VLLM = "vLLM", "vLLM fp8", "vLLM near-lossless"
VLLM_PYTHON = HERE.parent / ".venv-vllm/bin/python"
PEERS = (EXACT, *PRESSES, *QUANTIZED, *LLAMA, *VLLM)
KVLOOM = "full", "near-lossless", "balanced", "small", "small-kvzip"
BESIDE = {  # the recipe that peers with this ending are paired with
    EXACT: "full", "1/4": "balanced", "4 bits": "balanced", "1/7": "small", "2 bits": "small",
    "f16": "full", "q8_0": "full", "q4_0": "near-lossless", "vLLM": "full", "fp8": "full",
    "near-lossless": "near-lossless",
}  # fmt: skip
Mask = tuple[Tensor, Tensor, Tensor]


@dataclass
class PeerCache:
    """A cache that has read tokens, as the tasks of the evaluator use one.

    masks: of each layer, the row, head and token of each entry that kvpress hides, or None.
    """

    cache: Cache
    tokens: int
    masks: list[Mask | None]
    recipe = resolve("full")  # a question is read in one step

    def __deepcopy__(self, memo: dict[int, Any]) -> PeerCache:
        """Share the tensors, which no step writes to: quanto's cannot be copied."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        return replace(self, cache=cache)

    def logits(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Append tokens at their positions in the text; return the logits of the last, [B, V]."""
        for layer, mask in zip(model.model.layers, self.masks, strict=True):
            layer.self_attn.masked_key_indices = mask
        positions = torch.arange(self.tokens, self.tokens + ids.shape[1]).expand(ids.shape)
        self.tokens += ids.shape[1]
        output = model(
            input_ids=ids, past_key_values=self.cache, position_ids=positions, logits_to_keep=1
        )
        return output.logits[:, -1]

    def batch_repeat_interleave(self, rows: int) -> None:
        """Repeat the only row."""
        self.cache.batch_repeat_interleave(rows)
        self.masks = [mask and repeated(*mask, rows) for mask in self.masks]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of the cache, and of the masks."""
        return nbytes([[vars(layer) for layer in self.cache.layers], self.masks])

    @property
    def freed_nbytes(self) -> int:
        """The bytes without hidden entries and without masks."""
        layers, hidden = self.cache.layers, sum(len(mask[0]) for mask in self.masks if mask)
        entry = 2 * layers[0].keys.shape[-1] * layers[0].keys.element_size()
        return nbytes([vars(layer) for layer in layers]) - hidden * entry


def repeated(rows: Tensor, heads: Tensor, tokens: Tensor, count: int) -> Mask:
    """Return the mask of `count` equal rows, from that of one."""
    numbers = torch.arange(count).repeat_interleave(len(rows))
    return numbers, heads.repeat(count), tokens.repeat(count)


def nbytes(held: Any) -> int:
    """Return the bytes of all tensors in nested lists and dictionaries, by their sizes."""
    if isinstance(held, dict):
        held = list(held.values())
    elif isinstance(held, Tensor) and hasattr(held, "__tensor_flatten__"):  # made of several
        held = [getattr(held, name) for name in held.__tensor_flatten__()[0]]
    if isinstance(held, Tensor):
        return held.nbytes
    return sum(map(nbytes, held)) if isinstance(held, list | tuple) else 0


def read(model: PreTrainedModel, name: str, ids: Tensor) -> PeerCache:
    """Return the cache of a peer that has read a context, int64 [1, T]."""
    cache = DynamicCache()
    if name in QUANTIZED:
        cache = QuantizedCache(config=model.config, **QUANTIZED[name])
    tokens = ids.shape[1]
    with PRESSES[name](model) if name in PRESSES else contextlib.nullcontext():
        model.model(input_ids=ids, past_key_values=cache, cache_position=torch.arange(tokens))
    masks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    return PeerCache(cache, tokens, masks)


def finish(model: PreTrainedModel, measurement: Measurement[Result]) -> Result:
    """Run the forward passes that a measurement requests; return what it returns."""
    try:
        request = next(measurement)
        while True:
            request = measurement.send(request.cache.logits(model, request.ids))
    except StopIteration as end:
        return end.value


class Peers:
    """The model and contexts of the published run, and a folder with the lines of peers."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lab, self.folder = Lab(RUN), ResultFolder(folder)
        self.llama = LlamaModel(Path(self.lab.model.config._name_or_path))
        files = sorted(record.RESULTS.glob(f"*/evidence_{RUN}.json"))
        self.texts = json.loads(files[0].read_text())["protocol"]["texts"][SPEC]

    def samples(self) -> tuple[Source, list[Batch]]:
        """Return the contexts; exit if their texts are not those published."""
        plan = next(task for task in self.lab.plan.tasks if task.spec == SPEC)
        source, batches = self.lab.samples(plan)
        texts = (protocol.text_sha256(x) for batch in batches for x in batch.samples)
        if protocol.sha256(*texts) != self.texts:
            sys.exit(f"{SPEC}: the texts are not those of the published run {RUN}")
        return source, batches

    def measure(self, contexts: int, names: Sequence[str]) -> None:
        """Ask peers about the needles of some contexts, ten in each."""
        source, batches = self.samples()
        for batch in batches[:contexts]:
            finished = self.folder.outcomes(TASK.name)
            for name in names:
                if name not in VLLM and (batch.samples[0].name, name) not in finished:
                    begun = time.perf_counter()
                    self.folder.append(TASK.name, self.lines(source, batch, name))
                    seconds = time.perf_counter() - begun
                    print(f"{batch.samples[0].name} {name}: {seconds:.0f} s", flush=True)
        finished = self.folder.outcomes(TASK.name)
        for name in (name for name in names if name in VLLM):
            left = [x for x in batches[:contexts] if (x.samples[0].name, name) not in finished]
            if left:
                self.folder.append(TASK.name, list(self.vllm_lines(source, left, name)))

    def vllm_lines(
        self, source: Source, batches: Sequence[Batch], name: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the lines of a row of vLLM on contexts."""
        asked = [(batch.ids[0].tolist(), x) for batch in batches for x in batch.samples]
        job = {
            "model": located(self.lab.plan.model), "row": name,
            "prompts": [[*ids, *sample.payload.ids] for ids, sample in asked],
            "tokens": [sample.payload.tokens for _, sample in asked],
            "contexts": [len(ids) for ids, _ in asked],
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as work:
            (Path(work) / "job.json").write_text(json.dumps(job))
            script = HERE / "peers" / "vllm_answers.py"
            subprocess.run([VLLM_PYTHON, script, work], check=True)
            found = json.loads((Path(work) / "figures.json").read_text())
        stop = stop_ids(self.lab.model)
        for (ids, sample), answer, nbytes in zip(
            asked, found["answers"], found["nbytes"], strict=True
        ):
            text = source.decode(before_stop(answer, stop))
            yield self.line(sample, name, len(ids), nbytes, TASK.score(text, sample), text)

    def line(
        self,
        sample: Sample,
        name: str,
        tokens: int,
        nbytes: int,
        scores: dict[str, float],
        answer: str,
        freed: int | None = None,
    ) -> dict[str, Any]:
        """Return one line; freed: its bytes, had the peer freed what it hides."""
        return {
            "task": TASK.name, "sample": sample.name, "recipe": name, "kv_bytes": nbytes,
            "freed_bytes": nbytes if freed is None else freed,
            "exact_bytes": self.lab.geometry.token_nbytes() * tokens, "scores": scores,
            "answer": answer, "text": protocol.text_sha256(sample),
        }  # fmt: skip

    @torch.inference_mode()
    def lines(self, source: Source, batch: Batch, name: str) -> list[dict[str, Any]]:
        """Return the lines of a peer on one context."""
        cache: Any
        if name in LLAMA:
            cache = LlamaCache(self.llama, LLAMA[name], batch.ids)
        else:
            cache = read(self.lab.model, name, batch.ids)
        if name not in (EXACT, *PRESSES):  # its rows cannot be repeated
            source = replace(source, batch=1)
        run = Run(self.lab.model, source, cache, batch, None)
        outcomes, _ = finish(self.lab.model, TASK.measure(run))
        if name in LLAMA:
            cache.close()
        tokens, nbytes, freed = cache.tokens, cache.nbytes, cache.freed_nbytes
        return [
            self.line(sample, name, tokens, nbytes, outcome.scores, outcome.answer, freed)
            for sample, outcome in zip(batch.samples, outcomes, strict=True)
        ]

    def publish(self) -> None:
        """Print the table of all finished samples; write their figures, and the samples."""
        own = self.folder.lines(TASK.name)
        texts = {line["text"] for line in own}
        others = [
            line
            for line in published_samples(RUN)
            if line["recipe"] in KVLOOM and line["text"] in texts
        ]
        figures = figures_of([*others, *own])
        print(peers(figures))
        installed = "kvpress", "optimum-quanto", "hqq", "llama_cpp_python"
        packages = {name: version(name) for name in installed}
        result = {
            "environment": record.environment(dtype=DTYPE, **packages),
            "protocol": {
                "run": RUN,
                "texts": {SPEC: self.texts},
                "presses": {name: repr(press) for name, press in PRESSES.items()},
                "caches": {**QUANTIZED, **LLAMA},
            },
            "figures": figures,
        }
        record.write("evidence_peers", result)
        record.write_samples("evidence_peers", own)


def figures_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of recipes and peers; those of a peer have more.

    freed_share: as `share`, had the peer freed what it hides. beside, over_beside: a recipe, and
    the difference from it on the samples of both.
    """
    figures = [asdict(row) for row in summarize(lines)]
    for row in (row for row in figures if row["recipe"] in PEERS):
        own = [line for line in lines if line["recipe"] == row["recipe"]]
        freed = sum(line["freed_bytes"] for line in own)
        row["freed_share"] = freed / sum(line["exact_bytes"] for line in own)
        row["beside"] = next(x for end, x in BESIDE.items() if row["recipe"].endswith(end))
        row["over_beside"] = over(lines, TASK.name, row["recipe"], row["beside"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, default=28, help="of ten needles each")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, metavar="PEER")
    parser.add_argument("--folder", type=Path, default=HERE / "out" / "peers")
    options = parser.parse_args()
    if {*options.peers} & {*VLLM} and not VLLM_PYTHON.exists():
        parser.error(f"there is no {VLLM_PYTHON}; run: make .venv-vllm/ready")
    torch.set_num_threads(1)
    measured = Peers(options.folder)
    plain = copy.copy(measured.lab.tokenizer)
    plain.chat_template = None
    try:
        with mock.patch.object(AutoTokenizer, "from_pretrained", return_value=plain):  # for KVzip
            measured.measure(options.contexts, options.peers)
    finally:
        measured.publish()


if __name__ == "__main__":
    main()
