"""A task: the first tokens of a text come once more after it; the model should expect them."""

from itertools import pairwise

from torch import tensor

from kvloom_lab.eval.sample import Batch, Outcome, Sample, Task
from kvloom_lab.eval.tasks import register_task
from kvloom_lab.workload.passes import ForwardRequest
from kvloom_lab.workload.text import cut_rows


@register_task
class Repeat(Task):
    """Share of the repeated tokens that are expected; each is read after it was predicted."""

    name, main_score, about = "repeat", "expected", "Does the model expect repeated tokens?"

    def batches(self, source):
        batches = []
        for length in source.lengths:
            rows = cut_rows(source.text_ids, source.first, source.samples, length, source.seed)
            for i, row in enumerate(rows):
                repeated = row[len(source.first) :][: source.new_tokens + 1]
                fields = {"reference": source.decode(repeated), "fields": {"length": length}}
                sample = Sample(f"{length}/{i}", source.decode(row), payload=repeated, **fields)
                batches.append(Batch(row[None], [sample]))
        return batches

    def measure(self, run):
        repeated, correct = run.batch.samples[0].payload.tolist(), []
        for token, following in pairwise(repeated):
            ids = tensor([[token]], device=run.model.device)
            logits = yield ForwardRequest(ids, run.cache)  # [B, V]
            correct.append(logits[0].argmax().item() == following)
        return [Outcome({"expected": sum(correct) / len(correct)})], None

    def positions(self, batch):
        return len(batch.samples[0].payload) - 1
