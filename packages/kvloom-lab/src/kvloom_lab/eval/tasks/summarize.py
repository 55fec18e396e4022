"""Summaries of a user's texts, by the protocol of Keyformer (arXiv:2403.09054, section 4).

The prompt is that of MLPerf's summarization benchmark, which the paper uses; a chat template goes
around it if there is one. Scores are the F measures of ROUGE-1, ROUGE-2 and ROUGE-L on stemmed
words. Texts that are too long are cut at their end. Generation is greedy.
"""

from __future__ import annotations

import torch

from kvloom.errors import InputError

from ..sample import Batch, Sample, Source
from .asking import Asked, QuestionTask, data_records, drawn, frame, prompt_in
from .longbench import package

HEAD = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "Summarize the following news article:\n\n### Input:\n"
)
TAIL = "\n\n### Response:"
ROUGE = ("rouge1", "rouge2", "rougeL")


class Summarize(QuestionTask):
    """ROUGE of greedy summaries of at most `new_tokens` tokens."""

    name = "summarize"
    data = 'a file of JSON lines {"text": ..., "summary": ...}'

    def batches(self, source: Source) -> list[Batch]:
        """Return one context for each text, of at most the lengths of the source."""
        assert source.data is not None
        package("rouge_score.rouge_scorer")
        records = data_records(source.data, {"text": str, "summary": str})
        around = frame(source.tokenizer, source.first)
        prompt = prompt_in(source, around, TAIL)
        batches = []
        for length in source.lengths:
            room = prompt.room(length)
            if room <= len(source.encode(HEAD)):
                raise InputError(
                    f"summarize: a context of {length} tokens has no room for a text; use a longer "
                    "--context"
                )
            for record in drawn(records, source.samples, source.seed):
                text, summary = record.value["text"], record.value["summary"]
                ids = prompt.context(source.encode(HEAD + text)[:room])
                sample = Sample(
                    f"{length}/{record.file.stem}/line {record.line}",
                    source.decode(ids),
                    question=source.decode(prompt.question),
                    reference=summary,
                    fields={"length": length, "tokens": len(ids)},
                    data=Asked(prompt.question, [summary], source.new_tokens),
                )
                batches.append(Batch(torch.tensor([ids]), [sample]))
        return batches

    def score(self, text: str, sample: Sample) -> dict[str, float]:
        """Return the F measures of a summary."""
        scorer = package("rouge_score.rouge_scorer").RougeScorer(ROUGE, use_stemmer=True)
        scores = scorer.score(sample.reference, text)
        return {name: scores[name].fmeasure for name in ROUGE}
