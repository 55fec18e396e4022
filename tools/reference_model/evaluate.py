"""Measure the reference model: `PYTHONPATH=tools python -m reference_model.evaluate`.

Held-out perplexity, correct answers by length and depth (by plain `generate` with the full cache),
and the attention of the heads. Writes `evaluation.json` to the folder of the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvloom_lab.models import WEIGHTS

from . import tasks

LENGTHS = (512, 1024, 2048, 4096, 8192)
DEPTH_BINS = 5


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, measure, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m reference_model.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="folder of model, tokenizer")
    parser.add_argument("--questions", type=int, default=200, help="needles a length")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="JSON to write (default: evaluation.json there)")
    args = parser.parse_args(argv)
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = getattr(torch, args.dtype)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    found = measure(model, tokenizer, args.lengths, args.questions)
    text = json.dumps(found, indent=1) + "\n"
    (args.out or args.model / "evaluation.json").write_text(text)


def measure(model: Any, tokenizer: Any, lengths: Iterable[int], questions: int) -> dict[str, Any]:
    """Return every figure of the model card."""
    import transformers

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    found["perplexity"] = {str(n): perplexity(model, tokenizer, n) for n in (2048, 4096)}
    _say(found["perplexity"])
    found["needle"] = {}
    for length in lengths:
        depths = (np.arange(questions) + 0.5) / questions
        examples = [
            tasks.needle(tokenizer, context_tokens=length, seed=10_000 + i, depth=float(depth))
            for i, depth in enumerate(depths)
        ]
        right = answered(model, examples)
        found["needle"][str(length)] = {
            "right": float(np.mean(right)),
            "questions": questions,
            "by_depth": [float(np.mean(part)) for part in np.array_split(right, DEPTH_BINS)],
        }
        _say({length: found["needle"][str(length)]})
    found["other_tasks"] = other_tasks(model, tokenizer)
    _say(found["other_tasks"])
    found["attention"] = attention_structure(model, tokenizer)
    return found


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, length: int) -> dict[str, Any]:
    """Measure held-out text in windows of `length` tokens, each after its own BOS.

    `all` counts every token, `late` those with at least half a window before them.
    """
    encode = tasks.held_out_encoder(tokenizer)
    step = length - len(encode.bos)
    windows = [encode.text_ids[i : i + step] for i in range(0, len(encode.text_ids) - step, step)]
    every, late = [], []
    for window in windows:
        ids = torch.tensor([encode.bos + window.tolist()])
        logits = model(ids[:, :-1], use_cache=False).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        every.append(losses.mean().item())
        late.append(losses[length // 2 :].mean().item())
    return {
        "all": float(np.exp(np.mean(every))),
        "late": float(np.exp(np.mean(late))),
        "tokens": step * len(windows),
    }


@torch.no_grad()
def answered(model: Any, examples: Sequence[tasks.Example]) -> list[bool]:
    """Return for each prompt whether greedy generation returns exactly the answer."""
    right = []
    for example in examples:
        ids = torch.tensor([example.prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(example.answer_ids),
            do_sample=False,
        )
        right.append(out[0, ids.shape[1] :].tolist() == example.answer_ids)
    return right


def other_tasks(model: Any, tokenizer: Any, length: int = 2048) -> dict[str, Any]:
    """Return the share of correct answers in the other tasks at `length` tokens."""
    sets: dict[str, tuple[Any, dict[str, int], int]] = {
        "needle, 16 keys": (tasks.needle_set, {"n_keys": 16}, 5),
        "key-value list": (tasks.key_value_set, {"n_questions": 16}, 5),
        "copy 32 words": (tasks.copy_set, {}, 40),
        "variables, 1 hop": (tasks.variable_set, {"n_chains": 8, "hops": 1}, 10),
        "variables, 2 hops": (tasks.variable_set, {"n_chains": 8, "hops": 2}, 10),
    }
    found = {}
    for name, (make, options, contexts) in sets.items():
        examples = [
            tasks.Example(c.context_ids + q.question_ids, q.answer_ids, q.key, q.answer_at, q.depth)
            for seed in range(contexts)
            for c in [make(tokenizer, context_tokens=length, seed=20_000 + seed, **options)]
            for q in c.questions
        ]
        right = answered(model, examples)
        found[name] = {"right": float(np.mean(right)), "questions": len(right)}
    return found


@torch.no_grad()
def attention_structure(model: Any, tokenizer: Any, prompts: int = 24) -> dict[str, Any]:
    """Return attention mass at 1024 tokens by layer and head, [L, Hq].

    `sink`: mean mass of the first token over all queries from the 64th on. `recall`: mean mass
    of needle digit j for the query that predicts answer digit j.
    """
    was = model.config._attn_implementation
    model.set_attn_implementation("eager")
    sink, recall = [], []
    for seed in range(prompts):
        e = tasks.needle(tokenizer, context_tokens=1024, seed=30_000 + seed)
        ids = torch.tensor([e.prompt_ids + e.answer_ids])
        layers = model(ids, use_cache=False, output_attentions=True).attentions
        mass = torch.stack([a[0].float() for a in layers])  # [L, Hq, T, T]
        sink.append(mass[:, :, 64:, 0].mean(-1))
        digit = torch.arange(len(e.answer_ids))
        asking = len(e.prompt_ids) - 1 + digit
        recall.append(mass[:, :, asking, e.answer_at + digit].mean(-1))
    model.set_attn_implementation(was)
    return {
        "sink": torch.stack(sink).mean(0).tolist(),
        "recall": torch.stack(recall).mean(0).tolist(),
    }


def _say(what: dict[Any, Any]) -> None:
    print(json.dumps(what), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
