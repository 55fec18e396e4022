"""Train the reference model again: `PYTHONPATH=tools python -m reference_model.train --out DIR`.

Training is offline, on a CPU, and resumable: the same command continues from the last checkpoint in
`DIR`, and on SIGTERM it saves and stops. The schedule depends on progress from 0 to 1, measured in
steps (`--steps`, reproducible) or in hours of work (`--hours`); both may be changed on resuming.
Sequences grow from 128 to 4096 tokens: the model learns retrieval in short rows within minutes, and
longer distances take little more. The learning rate warms up, stays constant, then decays.

Needs torch 2.9 or later (`torch.optim.Muon`). With glibc, `MALLOC_MMAP_THRESHOLD_=4000000000
MALLOC_TRIM_THRESHOLD_=8000000000` keep freed memory and make steps about a quarter faster; on a
machine shared with others, `OMP_WAIT_POLICY=passive` keeps threads from spinning.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kvloom_lab.eval.needle_text import WORDS
from kvloom_lab.workload.text import train_documents

from . import attention, data, tasks
from .tokenizer import train_tokenizer

ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
# progress at which a stage starts: {tokens in a sequence: share of the steps}
STAGES: list[tuple[float, dict[int, float]]] = [
    (0.00, {256: 0.5, 128: 0.5}),
    (0.20, {512: 0.7, 256: 0.3}),
    (0.26, {1024: 0.7, 512: 0.2, 256: 0.1}),
    (0.37, {2048: 0.7, 1024: 0.2, 512: 0.1}),
    (0.64, {4096: 0.5, 2048: 0.25, 1024: 0.25}),
]
WARMUP_STEPS, DECAY_FROM, LAST_LR = 100, 0.60, 0.02
MATRIX_LR, OTHER_LR, MATRIX_DECAY = 0.02, 3e-3, 0.05
TEXT_SHARE = 1.0  # share of text tokens in the loss; less is faster, as the LM head takes a quarter
FEW_ANSWERS = 30  # in a step with fewer answer tokens, these have less weight
STEP_TOKENS = 8192
PROBE_EVERY, SAVE_EVERY = 250, 300.0  # steps, seconds


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m reference_model.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, log and export")
    parser.add_argument("--steps", type=int, help="end after so many steps")
    parser.add_argument("--hours", type=float, default=1.45, help="end after so many hours of work")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    Trainer(args.out, args.seed).run(args.steps, args.hours)


class Trainer:
    """Model, optimizers, data and log in one folder."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed = out, seed
        out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = load_or_train_tokenizer(out / "tokenizer")
        self.model = new_model(self.tokenizer)
        self.model.set_attn_implementation(attention.register())
        matrices = [p for n, p in self.model.named_parameters() if "layers" in n and p.ndim == 2]
        others = [p for n, p in self.model.named_parameters() if "layers" not in n or p.ndim < 2]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=MATRIX_DECAY, momentum=0.95),
            torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["top_lr"] = group["lr"]
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.resume()
        self.encode = data.training_encoder(self.tokenizer)
        self.probes = Probes(self.tokenizer)

    def run(self, steps: int | None, hours: float) -> None:
        """Train to the end of the schedule, logging and saving on the way."""
        self.stopping = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        saved = last = time.perf_counter()
        while (progress := self.progress(steps, hours)) < 1:
            length = self.length(progress)
            losses = self.train_step(length, progress)
            now = time.perf_counter()
            self.seconds, last = self.seconds + now - last, now
            self.step, self.tokens = self.step + 1, self.tokens + STEP_TOKENS
            if self.step % 20 == 0 or self.step == 1:
                self.log(dict(length=length, progress=round(progress, 4), **losses))
            if self.step % PROBE_EVERY == 0:
                self.log(self.probes.measure(self.model, self.longest(progress)))
            if now - saved > SAVE_EVERY or self.stopping:
                self.save()
                saved = now
            if self.stopping:
                return
        self.log(self.probes.measure(self.model, 4096))
        self.save()

    def progress(self, steps: int | None, hours: float) -> float:
        """Return the finished share of the schedule, 0 to 1."""
        return self.step / steps if steps else self.seconds / (hours * 3600)

    def stage(self, progress: float) -> dict[int, float]:
        """Return the lengths in use and their shares."""
        return [lengths for begin, lengths in STAGES if progress >= begin][-1]

    def longest(self, progress: float) -> int:
        """Return the longest sequence in use."""
        return max(self.stage(progress))

    def length(self, progress: float) -> int:
        """Draw this step's sequence length."""
        lengths = self.stage(progress)
        rng = np.random.default_rng([self.seed, self.step, 1])
        return int(rng.choice(list(lengths), p=list(lengths.values())))

    def train_step(self, length: int, progress: float) -> dict[str, float]:
        """Take one step on `STEP_TOKENS` tokens; return the losses in nats per token."""
        rng = np.random.default_rng([self.seed, self.step, 0])
        rows = data.batch(self.encode, rng, STEP_TOKENS // length, length)
        ids, weights = (torch.from_numpy(r.astype(np.int64)) for r in rows)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(ids[:, :-1], use_cache=False).last_hidden_state
            wanted = weights[:, 1:] == data.ANSWER
            wanted |= (weights[:, 1:] == data.TEXT) & (torch.rand(wanted.shape) < TEXT_SHARE)
            logits = self.model.lm_head(hidden[wanted])  # [wanted, V]
        loss = F.cross_entropy(logits.float(), ids[:, 1:][wanted], reduction="none")
        answer = weights[:, 1:][wanted] == data.ANSWER
        text_loss, answer_loss = loss[~answer].mean(), loss[answer].sum() / answer.sum().clamp(1)
        (text_loss + loss[answer].sum() / (answer.sum() + FEW_ANSWERS)).backward()
        torch.nn.utils.clip_grad_norm_(self.optimizers[1].param_groups[0]["params"], 1.0)
        rate = learning_rate(self.step, progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["top_lr"] * rate
            optimizer.step()
            optimizer.zero_grad()
        right = (logits.detach()[answer].argmax(-1) == ids[:, 1:][wanted][answer]).float().mean()
        return {
            "text": round(text_loss.item(), 4),
            "answer": round(answer_loss.item(), 4),
            "right": round(right.item(), 4),
            "lr": round(rate, 4),
        }

    def log(self, what: dict[str, Any]) -> None:
        """Append a line to the log and print it."""
        head = {"step": self.step, "seconds": round(self.seconds, 1), "tokens": self.tokens}
        line = json.dumps(head | what)
        print(line, flush=True)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """Write the checkpoint, and an export that transformers can load."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step, "seconds": self.seconds, "tokens": self.tokens,
        }  # fmt: skip
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")
        export(self.model, self.tokenizer, self.out / "export")

    def resume(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            tops = [g["top_lr"] for g in optimizer.param_groups]
            optimizer.load_state_dict(kept)
            for group, top in zip(optimizer.param_groups, tops, strict=True):
                group["top_lr"] = top
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]


class Probes:
    """Fixed held-out prompts and text that are evaluated during training."""

    def __init__(self, tokenizer: Any, prompts: int = 24) -> None:
        encode = tasks.held_out_encoder(tokenizer)
        self.prompts = {
            length: [tasks.needle(tokenizer, context_tokens=length, seed=s) for s in range(prompts)]
            for length in (256, 512, 1024, 2048, 4096)
        }
        rng = np.random.default_rng(0)
        windows = [encode.bos + encode.window(rng, 1023).tolist() for _ in range(12)]
        self.text = torch.tensor(windows)

    @torch.no_grad()
    def measure(self, model: Any, longest: int) -> dict[str, Any]:
        """Return the share of correct answers up to `longest` tokens, and the text loss."""
        found: dict[str, Any] = {}
        with torch.autocast("cpu", torch.bfloat16):
            for length, examples in self.prompts.items():
                if length > 2 * longest:
                    continue
                answers = torch.tensor([e.answer_ids for e in examples])
                ids = torch.cat([torch.tensor([e.prompt_ids for e in examples]), answers], 1)
                right = []
                for piece, answer in zip(ids.split(6), answers.split(6), strict=True):
                    logits = model(
                        piece[:, :-1], use_cache=False, logits_to_keep=answer.shape[1]
                    ).logits
                    right.append((logits.argmax(-1) == answer).all(1))
                found[str(length)] = round(torch.cat(right).float().mean().item(), 3)
            losses = [
                F.cross_entropy(model(t[:, :-1]).logits.float().flatten(0, 1), t[:, 1:].flatten())
                for t in self.text.split(4)
            ]
        return {"recall": found, "held_out_text": round(torch.stack(losses).mean().item(), 4)}


def learning_rate(step: int, progress: float) -> float:
    """Return the share of the maximum learning rate: warm-up, constant, linear decay."""
    decay = (1 - progress) / (1 - DECAY_FROM)
    return min(1.0, (step + 1) / WARMUP_STEPS, max(LAST_LR, decay))


def load_or_train_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in `folder`, trained on corpus and task phrases if it does not exist."""
    from transformers import AutoTokenizer

    if not folder.exists():
        phrases = " magic number Question List value of key set" + "".join(f" {w}" for w in WORDS)
        texts = [d.text for d in train_documents()] + [phrases + "\n"] * 3000
        train_tokenizer(texts).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def new_model(tokenizer: Any) -> Any:
    """Return an untrained Llama of the reference size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **ARCHITECTURE,
    )
    return LlamaForCausalLM(config)


def export(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write bf16 weights, config and tokenizer in the format of transformers."""
    import copy

    model = copy.deepcopy(model).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    kept = {k: v for k, v in json.loads(path.read_text()).items() if "local" not in k}
    path.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
