"""Write the model card from measured figures.

    PYTHONPATH=tools python -m reference_model.card --log LOG --command COMMAND

Reads `evaluation.json` in the folder of the weights, and the training log; draws the plots; fills
in the card's text. Every number in the card comes from these two files.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from kvloom_lab.models import WEIGHTS

CARD = """\
# The reference model of kvloom

A small Llama, trained from scratch on a CPU, to measure the quality of a compressed KV cache
offline. It predicts real text, and it retrieves facts from up to 4096 tokens before. It is an
instrument for measurements, not a language model for users.

## Architecture

`LlamaForCausalLM`, {parameters:,} parameters, stored in bfloat16: {num_hidden_layers} layers,
hidden size {hidden_size}, {num_attention_heads} query heads on {num_key_value_heads} key-value
heads of {head_dim} channels, SwiGLU of width {intermediate_size}, RMSNorm, no biases, input and
output embedding tied, RoPE with theta {theta:g}. Trained on sequences of up to 4096 tokens;
the configuration accepts longer ones. The tokenizer is a byte-level BPE of
{vocab_size} tokens in which every digit is a token and every text starts with `<s>`.
`calibration.kvcal` is its calibration for `skvq`, `rptq` and `smoothquant`
(`benchmarks/calibrate_reference.py` writes it).

## Data

Text that ships with CPython: the standard library's sources, tests included, and the help topics
of `pydoc` ({python}; `kvloom_lab/workload/text.py` collects them). {held_out} % of the files,
chosen by a hash of their names, are held out. {task_share} of the sequences (more of the short
ones) contain tasks that `tools/reference_model/tasks.py` generates: needles, key-value lists,
copying and variable tracking, with a question about every fact. The weights have this project's
licence; the text has the PSF licence.

## Training

    {command}

{note}{training}

![loss and recall by step](training.png)

`--steps {steps}` repeats the schedule on a machine of another speed. The optimizers are Muon for
the matrices and AdamW for embedding and norms, under bfloat16 autocast.

## Measured

By `PYTHONPATH=tools python -m reference_model.evaluate` ({dtype}, torch {torch},
transformers {transformers},
full cache, greedy `generate`; the figures are in `evaluation.json`). An answer is correct only if
all 7 digits are; each prompt contains 4 needles in held-out text, and prompt i asks about one at
depth (i + ½)/n.

{needle}

Training used no prompts longer than 4096 tokens. Other tasks, 2048 tokens of context:

{other}

Held-out perplexity per token ({chars:.2f} characters per token), windows after one `<s>`;
“late” counts only tokens with at least half a window before them, so the two windows count
different tokens:

{perplexity}

## Attention of the heads

![mass on the first token](sink.png)
![mass on the needle's digit](recall.png)

In 1024-token needle prompts with eager attention: the mean mass on `<s>` of all queries from the
64th on, and the mean mass on needle digit j of the query that predicts answer digit j.

## Limits

- It has only a weak attention sink: most heads hardly attend to `<s>`. Hence the gain from
  protecting the first tokens is smaller here than in large models.
- Its text is Python sources and reference prose; its perplexity does not apply to other text.
- Questions have the forms of these tasks; the model follows no instructions.
- It was trained for retrieval, so few heads do it, with sharp attention. A method that keeps those
  tokens does well here; a large model may distribute the same work over many heads.
"""


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, draw the plots, write the card."""
    parser = argparse.ArgumentParser(prog="python -m reference_model.card", description=__doc__)
    parser.add_argument("--log", type=Path, required=True, help="log.jsonl of the training")
    parser.add_argument("--command", required=True, help="the training command, for the card")
    parser.add_argument("--note", default="", help="a further remark about the run")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    args = parser.parse_args(argv)
    log = [json.loads(line) for line in args.log.read_text().splitlines()]
    found = json.loads((args.weights / "evaluation.json").read_text())
    config = json.loads((args.weights / "config.json").read_text())
    draw_training(log, args.weights / "training.png")
    draw_heads(found["attention"]["sink"], "mass on the first token", args.weights / "sink.png")
    draw_heads(
        found["attention"]["recall"], "mass on the needle's digit", args.weights / "recall.png"
    )
    (args.weights / "README.md").write_text(card(log, found, config, args.command, args.note))


def card(
    log: list[dict[str, Any]],
    found: dict[str, Any],
    config: dict[str, Any],
    command: str,
    note: str,
) -> str:
    """Return the card's text."""
    from kvloom_lab.models import reference_tokenizer
    from kvloom_lab.workload.text import HELD_OUT_PERCENT, held_out_documents

    from . import data, tasks

    characters = sum(len(d.text) for d in held_out_documents())
    tokens = len(tasks.held_out_encoder(reference_tokenizer()).text_ids)
    parameters = config.get("rope_parameters") or config
    return CARD.format(
        **{k: v for k, v in config.items() if k in CARD and isinstance(v, int)},
        theta=parameters["rope_theta"],
        parameters=found["parameters"],
        python=f"CPython {found['python']}",
        held_out=HELD_OUT_PERCENT,
        task_share=f"{1 - data.MIX['text']:.0%}".replace("%", " %"),
        command=command,
        note=note and textwrap.fill(note, 98) + "\n\n",
        steps=log[-1]["step"],
        training=_training(log),
        dtype=found["dtype"],
        torch=found["torch"],
        transformers=found["transformers"],
        needle=_needle(found["needle"]),
        other=_other(found["other_tasks"]),
        chars=characters / tokens,
        perplexity=_perplexity(found["perplexity"]),
    )


def draw_training(log: list[dict[str, Any]], path: Path) -> None:
    """Plot text loss and recall by step."""
    plt = _pyplot()
    steps = [r for r in log if "text" in r]
    probes = [r for r in log if "recall" in r]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(
        [r["step"] for r in steps], [r["text"] for r in steps], lw=0.6, label="training, tasks too"
    )
    left.plot([r["step"] for r in probes], [r["held_out_text"] for r in probes], label="held out")
    left.set(xlabel="step", ylabel="text loss, nats a token", ylim=(1, 5))
    left.legend()
    for length in probes[-1]["recall"]:
        known = [(r["step"], r["recall"][length]) for r in probes if length in r["recall"]]
        right.plot(*zip(*known, strict=True), label=f"{length} tokens")
    right.set(xlabel="step", ylabel="whole answers right (24 probes)", ylim=(0, 1.02))
    right.legend(fontsize=7)
    figure.savefig(path, dpi=80)


def draw_heads(mass: list[list[float]], title: str, path: Path) -> None:
    """Draw mass [L, Hq] as a table of numbers with background colours."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(3.6, 3.4), layout="constrained")
    axes.imshow(mass, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for i, row in enumerate(mass):
        for j, value in enumerate(row):
            colour = "black" if value > 0.6 else "white"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set(xlabel="query head", ylabel="layer", title=title, xticks=range(len(mass[0])))
    figure.savefig(path, dpi=80)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def _training(log: list[dict[str, Any]]) -> str:
    probes = [r for r in log if "recall" in r]
    chosen = [probes[round(i * (len(probes) - 1) / 9)] for i in range(10)]
    lengths = list(probes[-1]["recall"])
    rows = [
        [f"{r['step']}", f"{r['tokens'] / 1e6:.1f} M", f"{r['seconds'] / 60:.0f}"]
        + [f"{r['held_out_text']:.2f}"]
        + [f"{r['recall'][n]:.2f}" if n in r["recall"] else "" for n in lengths]
        for r in chosen
    ]
    head = ["step", "tokens", "minutes", "held-out loss", *(f"recall {n}" for n in lengths)]
    last = log[-1]
    return (
        f"{last['step']} steps, {last['tokens'] / 1e6:.0f} million tokens, "
        f"{last['seconds'] / 60:.0f} minutes on two CPU cores shared with other work:\n\n"
        + _table(head, rows)
    )


def _needle(needle: dict[str, Any]) -> str:
    bins = len(next(iter(needle.values()))["by_depth"])
    edges = [f"depth {i * 100 // bins}–{(i + 1) * 100 // bins} %" for i in range(bins)]
    rows = [
        [n, f"{r['right']:.1%}", f"{r['questions']}", *(f"{d:.1%}" for d in r["by_depth"])]
        for n, r in needle.items()
    ]
    return _table(["tokens", "whole answers right", "prompts", *edges], rows)


def _other(tasks: dict[str, Any]) -> str:
    rows = [[n, f"{r['right']:.1%}", f"{r['questions']}"] for n, r in tasks.items()]
    return _table(["task", "whole answers right", "questions"], rows)


def _perplexity(found: dict[str, Any]) -> str:
    rows = [[n, f"{r['all']:.2f}", f"{r['late']:.2f}"] for n, r in found.items()]
    return _table(["window", "perplexity", "late"], rows)


if __name__ == "__main__":
    main()
