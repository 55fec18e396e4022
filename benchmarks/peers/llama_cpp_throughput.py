"""One run of requests in llama.cpp with parallel sequences, K and V in f16 or q4_0.

`throughput.py` starts it. The weights of SmolLM2 are written as GGUF in bf16, flash attention is
on. Each sequence has a cache of its own, rounded up to 256 cells: in a cache that all share, four
requests fit instead of three, but a prompt takes 1.4 times as long, as it reads the others' cells.
Prompts are read one after the other, then all sequences decode.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import common
import gguf
import llama_cpp as ll
import llama_cpp_steps as steps
import numpy as np
from safetensors.numpy import load_file

BYTES_OF_32 = {"f16": 64, "q8_0": 34, "q4_0": 18}
"""Bytes of 32 values of a cache."""
CELLS = 256
"""llama.cpp rounds the cells of a sequence up to a multiple of this."""
KL_ROWS = 2
NAMES = {
    "token_embd": "embed_tokens", "output": "embed_tokens", "output_norm": "norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip
"""Names of tensors in llama.cpp and in transformers."""


def shape_of(model: Path, tokens: int) -> tuple[Namespace, dict[str, Any]]:
    """Return the shape of a model and its config."""
    config = json.loads((model / "config.json").read_text())
    shape = Namespace(
        contexts=[tokens], hidden=config["hidden_size"], layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"], q_heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"],
        vocabulary=config["vocab_size"],
    )  # fmt: skip
    return shape, config


def write_model(model: Path, path: Path, shape: Namespace, config: dict[str, Any]) -> None:
    """Write the weights of a folder as GGUF: matrices in bf16, norms in fp32."""
    tensors = load_file(model / "model.safetensors")

    def weight(name: str, *sizes: int) -> np.ndarray:
        *block, own, _ = name.split(".")
        layer = f"layers.{block[1]}." if block else ""
        values = tensors[f"model.{layer}{NAMES[own]}.weight"].astype(np.float32)
        assert values.shape == sizes, name
        if own in ("attn_q", "attn_k"):  # llama.cpp rotates neighbours, transformers halves
            halves = values.reshape(-1, 2, shape.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.BF16
        return gguf.quants.quantize(values, kind) if values.ndim == 2 else values

    steps.write_model(
        shape, path, weight, config["rope_parameters"]["rope_theta"], config["rms_norm_eps"]
    )


class Sequences:
    """A context of llama.cpp with parallel sequences."""

    def __init__(self, path: Path, kind: str, cells: int, requests: int, vocabulary: int) -> None:
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = ll.llama_model_load_from_file(str(path).encode(), params)
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = cells, requests, False
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = steps.TYPES[kind]
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        self.context = ll.llama_init_from_model(self.model, params)
        if not self.context or ll.llama_n_ctx(self.context) != cells:
            sys.exit(f"llama.cpp could not make a context of {cells} cells")
        self.vocabulary = vocabulary

    def read(self, tokens: list[tuple[int, int, int]], wanted: int) -> np.ndarray:
        """Evaluate (id, position, sequence) and return the logits of the last `wanted` [n, V]."""
        batch = ll.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i >= len(tokens) - wanted
        failed = ll.llama_decode(self.context, batch)
        ll.llama_batch_free(batch)
        if failed:
            sys.exit(f"llama.cpp refused a batch ({failed})")
        logits = ll.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (wanted, self.vocabulary))

    def clear(self) -> None:
        """Remove all tokens."""
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)


def run(pool: Sequences, ids: list[list[int]], prompt: int, new: int) -> tuple[dict, np.ndarray]:
    """Return the figures of requests, as `RunFigures` of `bench throughput`, and logits of two.

    The logits [2, new - 1, V] are those after the tokens of the answers.
    """
    kept = []
    begin = time.perf_counter(), time.process_time()
    firsts = []
    for sequence, row in enumerate(ids):
        tokens = [(token, i, sequence) for i, token in enumerate(row[:prompt])]
        pool.read(tokens, 1).argmax(-1)
        firsts.append(time.perf_counter() - begin[0])
    read = time.perf_counter() - begin[0], time.process_time() - begin[1]
    for i in range(prompt, prompt + new - 1):
        logits = pool.read([(row[i], i, sequence) for sequence, row in enumerate(ids)], len(ids))
        logits.argmax(-1)
        kept.append(logits[:KL_ROWS].copy())
    both = time.perf_counter() - begin[0], time.process_time() - begin[1]
    figures = {
        "batch": len(ids), "first_s": statistics.median(firsts), "prompt_s": read,
        "decode_s": [both[i] - read[i] for i in (0, 1)], "decoded": len(ids) * (new - 1),
    }  # fmt: skip
    return figures, np.stack(kept, 1)


def divergence(exact: np.ndarray, logits: np.ndarray) -> float:
    """Return the mean KL divergence from exact log-probabilities [B, T, V], in nats."""
    logits = logits - logits.max(-1, keepdims=True)
    ours = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float((np.exp(exact) * (exact - ours)).sum(-1).mean())


def main() -> None:
    job, work = common.read_job(), Path(sys.argv[1])
    ll.llama_log_set(steps._silent, ctypes.c_void_p(None))
    ll.llama_backend_init()
    kind = job["row"].removeprefix("llama.cpp ")
    model, tokens = Path(job["model"]), job["prompt"] + job["new"]
    shape, config = shape_of(model, tokens)
    path = work / "model.gguf"
    if not path.exists():
        write_model(model, path, shape, config)
    cell = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES_OF_32[kind] // 32
    sequence = -(-tokens // CELLS) * CELLS
    requests = job["memory"] // (sequence * cell)
    cells = sequence * requests
    pool = Sequences(path, kind, cells, requests, shape.vocabulary)
    run(pool, job["ids"][:1], job["prompt"], 3)
    pool.clear()
    figures, logits = run(pool, job["ids"][:requests], job["prompt"], job["new"])
    exact = np.load(work / "exact.npy") if job["first"] else None
    common.write_figures(
        **figures, kv_bytes=cells * cell, kl=None if exact is None else divergence(exact, logits),
        versions={"llama_cpp_python": ll.__version__, "gguf": "0.19.0"},
    )  # fmt: skip


if __name__ == "__main__":
    main()
