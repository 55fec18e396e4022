"""A llama.cpp cache that has read a context, as the tasks of the evaluator use one.

K and V are in f16, q8_0 or q4_0, flash attention is on. Copies take turns: a new one removes what
the one before has appended.
"""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp as ll
import llama_cpp_steps as steps
import torch
from llama_cpp_throughput import BYTES_OF_32, CELLS, Sequences, shape_of, write_model
from torch import Tensor

from kvloom.recipe import resolve

CHUNK = 1024  # tokens of a batch
QUESTION = 256  # cells beside the context


class LlamaModel:
    """A model's weights as GGUF, in a temporary folder for as long as this lives."""

    def __init__(self, folder: Path) -> None:
        ll.llama_log_set(steps._silent, ctypes.c_void_p(None))
        ll.llama_backend_init()
        self._temporary = tempfile.TemporaryDirectory()
        self.path = Path(self._temporary.name) / "model.gguf"
        self.shape, config = shape_of(folder, 8192)
        write_model(folder, self.path, self.shape, config)


class LlamaCache:
    """One sequence of llama.cpp; its first `tokens` tokens are the context, int64 [1, T].

    nbytes: of the context's keys and values, padded as llama.cpp pads them.
    """

    recipe = resolve("full")  # a question is read in one step

    def __init__(self, model: LlamaModel, kind: str, ids: Tensor) -> None:
        cells = -(-(ids.shape[1] + QUESTION) // CELLS) * CELLS
        self._pool = Sequences(model.path, kind, cells, 1, model.shape.vocabulary)
        self.tokens = self._position = 0
        for chunk in ids.split(CHUNK, dim=1):
            self.logits(None, chunk)
        self.tokens, shape = self._position, model.shape
        token = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES_OF_32[kind] // 32
        self.nbytes = self.freed_nbytes = -(-self.tokens // CELLS) * CELLS * token

    def __deepcopy__(self, memo: dict[int, Any]) -> LlamaCache:
        """Return this cache with the context alone."""
        memory = ll.llama_get_memory(self._pool.context)
        ll.llama_memory_seq_rm(memory, 0, self.tokens, -1)
        self._position = self.tokens
        return self

    def logits(self, model: Any, ids: Tensor) -> Tensor:
        """Append tokens int64 [1, T]; return the logits of the last, fp32 [1, V]."""
        tokens = [(token, self._position + i, 0) for i, token in enumerate(ids[0].tolist())]
        self._position += len(tokens)
        return torch.from_numpy(self._pool.read(tokens, 1).copy())

    def close(self) -> None:
        """Free the context and the weights."""
        ll.llama_free(self._pool.context)
        ll.llama_model_free(self._pool.model)
