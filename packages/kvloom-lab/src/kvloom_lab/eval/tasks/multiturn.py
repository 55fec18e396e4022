"""Several questions on one compressed context, then a second document and questions about it.

One cache serves all turns: it keeps every question and every answer, so that what a recipe
evicts or distorts in one turn is missing in the next. Facts and questions are those of `niah`,
without a chat template. The second document has half the length of the first and is appended in one
step; a recipe with recall reads the questions token by token.
"""

from __future__ import annotations

import numpy as np
import torch

from kvloom.errors import InputError

from ...workload.crew import Ask, Work
from ..decoding import greedy
from ..questions import draw_number
from ..sample import Batch, Outcome, Run, Sample, Source
from .asking import Asked, share_found
from .chat import encode
from .haystack import hide
from .niah import draw_keys, plain_fact, question_ids

TURNS = 4  # questions about each of the two documents
DEPTHS = tuple(((np.arange(TURNS) + 0.5) / TURNS).tolist())


class Multiturn:
    """Facts found, by turn and document."""

    name, data = "multiturn", ""

    def batches(self, source: Source) -> list[Batch]:
        """Return contexts of exactly the lengths of the source, with eight turns each."""
        if source.ask == "inside":
            raise InputError("multiturn asks eight questions; use it with --ask after")
        return [
            _conversation(source, length, count)
            for length in source.lengths
            for count in range(source.samples)
        ]

    def measure(self, run: Run[None]) -> Work[tuple[list[Outcome], None]]:
        """Ask turn by turn; the last token of an answer is read with the next turn."""
        device, outcomes = run.model.device, []
        last: list[int] = []
        for sample in run.batch.samples:
            document, asked = sample.data
            if document:
                yield Ask(torch.tensor([[*last, *document]], device=device), run.cache)
                last = []
            ids = torch.tensor([[*last, *asked.ids]], device=device)
            answer = (yield from greedy(run.cache, ids, asked.tokens))[0].tolist()
            last = answer[-1:]
            text = run.source.decode(answer)
            outcomes.append(
                Outcome(
                    scores={"correct": share_found(text, asked.expected)},
                    answer=text,
                    tokens=run.source.pieces(answer),
                )
            )
        return outcomes, None

    def positions(self, batch: Batch) -> int:
        """Return the positions of all turns and of the second document."""
        data = [sample.data for sample in batch.samples]
        return sum(len(document) + len(a.ids) + a.tokens for document, a in data) - 1


def _conversation(source: Source, length: int, count: int) -> Batch:
    """Return a context of exactly `length` ids, and the turns after it."""
    rng = np.random.default_rng([source.seed, length, count])
    names = draw_keys(rng, 2 * TURNS)
    values = [draw_number(rng) for _ in names]
    facts = [encode(source.tokenizer, plain_fact(k, v)) for k, v in zip(names, values, strict=True)]
    first = hide(source, rng, facts[:TURNS], DEPTHS, length - len(source.first))
    second = hide(source, rng, facts[TURNS:], DEPTHS, length // 2)
    texts = [source.decode([*source.first, *first]), source.decode(second)]
    samples = []
    for turn, (key, value) in enumerate(zip(names, values, strict=True)):
        part, place = divmod(turn, TURNS)
        ids = question_ids(
            source.tokenizer, f"\nQuestion: The magic number for {key} is", "", value
        )
        tokens = len(encode(source.tokenizer, f" {value}")) + 1
        samples.append(
            Sample(
                f"{length}/{count}/turn {turn + 1}",
                texts[part],
                question=source.decode(ids),
                reference=value,
                fields={
                    "length": length, "turn": turn + 1, "document": part + 1,
                    "depth": DEPTHS[place],
                },
                data=(second if part and not place else [], Asked(ids, [value], tokens)),
            )
        )  # fmt: skip
    return Batch(torch.tensor([[*source.first, *first]]), samples)
