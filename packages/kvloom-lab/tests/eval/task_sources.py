"""What tests of the tasks share: texts, and sources of samples."""

import tiny
from kvloom_lab.eval.sample import Source
from kvloom_lab.models import reference_tokenizer

CHAT = "<user>{{ messages[0]['content'] }}</user>{% if add_generation_prompt %}<bot>{% endif %}"
PROSE = " ".join(f"Line {i} is about a {w}." for i, w in enumerate(("cat", "dog", "bird") * 400))


def source(text=tiny.TEXT, tokenizer=None, **settings):
    usual = {"lengths": [300], "samples": 1, "new_tokens": 8, "batch": 4, "seed": 0}
    return Source.of(tokenizer or tiny.tokenizer(), text, **usual | settings)


def only(batches):
    assert len(batches) == 1
    return batches[0], batches[0].samples[0]


def ruler_source(**settings):
    return source(PROSE, reference_tokenizer(), **settings)
