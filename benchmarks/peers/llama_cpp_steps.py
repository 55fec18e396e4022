"""Whole decode steps of llama.cpp, with K and V in f16, q8_0 and q4_0, flash attention on.

A model of the same shape with random weights (f16) is written as GGUF with the `gguf` package. Its
cache is filled at low cost: the context is evaluated as sequences of 256 tokens that do not attend
to each other, at the positions of one long sequence, which are then joined to one sequence. A step
reads the same bytes as after a real prompt; the prompt's time is not comparable and not given. The
token of each step is removed again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import gguf
import llama_cpp as ll
import numpy as np

TYPES = {"f16": ll.GGML_TYPE_F16, "q8_0": ll.GGML_TYPE_Q8_0, "q4_0": ll.GGML_TYPE_Q4_0}
SEQUENCE = 256  # tokens
MAX_SEQUENCES = 255  # separate sequences in llama.cpp, besides the joined one


def random_weights() -> Callable[..., np.ndarray]:
    """Return a function of a tensor's name and shape that makes it at random, in f16."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(np.float16)

    return weight


def write_model(
    given, path: Path, weight: Callable[..., np.ndarray], rope_base: float = 1e4,
    epsilon: float = 1e-6,
) -> int:  # fmt: skip
    """Write the model; return the bytes of weights that a step reads.

    weight: of a tensor's name and shape; bytes are bf16. rope_base, epsilon: of the rotary
    embedding and the norms.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(max(given.contexts) + 4096)
    writer.add_embedding_length(given.hidden)
    writer.add_block_count(given.layers)
    writer.add_feed_forward_length(given.intermediate)
    writer.add_head_count(given.q_heads)
    writer.add_head_count_kv(given.kv_heads)
    writer.add_key_length(given.head_dim)
    writer.add_value_length(given.head_dim)
    writer.add_rope_dimension_count(given.head_dim)
    writer.add_rope_freq_base(rope_base)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_vocab_size(given.vocabulary)
    writer.add_file_type(1)
    writer.add_tokenizer_model("no_vocab")
    nbytes = 0

    def add(name: str, *shape: int) -> None:
        nonlocal nbytes
        values = weight(name, *shape)
        kind = gguf.GGMLQuantizationType.BF16 if values.dtype == np.uint8 else None
        writer.add_tensor(name, values, raw_dtype=kind)
        nbytes += values.nbytes

    add("token_embd.weight", given.vocabulary, given.hidden)
    nbytes = 0  # a step reads one row
    q, kv = given.q_heads * given.head_dim, given.kv_heads * given.head_dim
    for i in range(given.layers):
        block = f"blk.{i}"
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{block}.{norm}.weight", given.hidden)
        add(f"{block}.attn_q.weight", q, given.hidden)
        add(f"{block}.attn_k.weight", kv, given.hidden)
        add(f"{block}.attn_v.weight", kv, given.hidden)
        add(f"{block}.attn_output.weight", given.hidden, q)
        for name in ("ffn_gate", "ffn_up"):
            add(f"{block}.{name}.weight", given.intermediate, given.hidden)
        add(f"{block}.ffn_down.weight", given.hidden, given.intermediate)
    add("output_norm.weight", given.hidden)
    add("output.weight", given.vocabulary, given.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return nbytes


class Steps:
    """A context of llama.cpp, filled to a depth."""

    def __init__(self, given, model, kind: int, context: int) -> None:
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context + 512, SEQUENCE, SEQUENCE
        params.n_seq_max, params.kv_unified = MAX_SEQUENCES + 1, True
        params.n_threads = params.n_threads_batch = given.threads
        params.type_k = params.type_v = kind
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        self.context = ll.llama_init_from_model(model, params)
        if not self.context:
            sys.exit("llama.cpp could not make a context")
        self.memory = ll.llama_get_memory(self.context)
        self.depth = context
        rng = np.random.default_rng(1)
        for lo in range(0, context, SEQUENCE):
            n, sequence = min(SEQUENCE, context - lo), 1 + lo // SEQUENCE % MAX_SEQUENCES
            self._eval(rng.integers(0, given.vocabulary, n), lo, sequence)
            ll.llama_memory_seq_cp(self.memory, sequence, 0, lo, lo + n)
            ll.llama_memory_seq_rm(self.memory, sequence, -1, -1)

    def step(self) -> None:
        """Append one token to the context, and remove it again."""
        self._eval([1], self.depth, 0, logits=True)
        ll.llama_memory_seq_rm(self.memory, 0, self.depth, -1)

    def nbytes(self, given, bytes_of_32: int) -> int:
        """Return the bytes of keys and values."""
        values = 2 * given.layers * given.kv_heads * given.head_dim * self.depth
        return values * bytes_of_32 // 32

    def close(self) -> None:
        ll.llama_free(self.context)

    def _eval(self, ids, first: int, sequence: int, logits: bool = False) -> None:
        n = len(ids)
        batch = ll.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = int(token), first + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = logits
        failed = ll.llama_decode(self.context, batch)
        ll.llama_batch_free(batch)
        if failed:
            sys.exit(f"llama.cpp refused a batch at token {first} ({failed})")


def main() -> None:
    given = common.options(__doc__.splitlines()[0])
    ll.llama_log_set(_silent, None)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        weights = write_model(given, path, random_weights())
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 0
        model = ll.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            sys.exit("llama.cpp could not read the model")
        for context in given.contexts:
            contexts = {}
            for name, kind in TYPES.items():
                begin = time.perf_counter()
                contexts[f"llama.cpp {name}"] = Steps(given, model, kind, context)
                took = time.perf_counter() - begin
                print(f"filled {context:,} tokens of {name} in {took:.0f} s", file=sys.stderr)
            times = common.alternate({name: s.step for name, s in contexts.items()}, given.repeats)
            for (name, steps), size in zip(contexts.items(), (64, 34, 18), strict=True):
                kv = steps.nbytes(given, size)
                rows.append(common.row(given, name, context, times[name], kv, weights, {}))
                steps.close()
        ll.llama_model_free(model)
    common.write(given, rows, {"llama_cpp_python": ll.__version__})


@ll.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """llama.cpp reports every tensor."""


if __name__ == "__main__":
    main()
