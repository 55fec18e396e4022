"""`full` is plain transformers on every architecture, or `attach` refuses the model by name."""

import by_hand
import comparison
import published
import pytest
import transformers
from comparison import EQUAL, NOT_BUILT, PLAIN_FAILS, REFUSED

from pairwise import some_slow

# One of each kind of layer, mask, position and refusal.
QUICK = (
    "bart", "bert", "bloom", "cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3", "gemma4_text",
    "git", "gpt2", "gpt_bigcode", "gpt_oss", "jamba", "lfm2", "llama", "llama4_text", "llava",
    "mamba", "minimax", "mistral", "mllama", "modernbert-decoder", "paligemma", "qwen2_vl",
    "qwen3_next", "t5gemma2", "zamba2",
)  # fmt: skip
MODELS = {"/".join(pair): pair for pair in comparison.models()}
PUBLISHED = published.load()


@some_slow("pair", MODELS, *(name for name, pair in MODELS.items() if pair[0] in QUICK))
def test_full_is_plain_transformers_or_refused_by_name(pair):
    records = comparison.outcomes(*pair)
    assert [r for r in records if not allowed(r)] == []
    expected = PUBLISHED.get(transformers.__version__, {}).get(pair)
    if expected is not None:
        assert summary(records) == summary(expected)


def allowed(record):
    """Return whether a record is one of the outcomes that a user may meet."""
    if record["outcome"] == EQUAL:
        return record["compressed"] == 0 or record["reach"] > 10 * comparison.TOLERANCE
    if record["outcome"] == REFUSED:
        return record["at"] == "attach" or record["form"] == "image"
    return record["outcome"] == PLAIN_FAILS or (
        record["outcome"] == NOT_BUILT and record["type"] in by_hand.NOT_BUILT
    )


def summary(records):
    return [(record["form"], record["outcome"]) for record in records]


@pytest.mark.parametrize("version", PUBLISHED)
def test_published_results_have_no_other_outcome(version):
    records = [record for records in PUBLISHED[version].values() for record in records]
    assert [r for r in records if not allowed(r)] == []


def test_the_page_shows_the_published_results():
    text = published.PAGE.read_text()
    assert published.filled(text) == text
    assert list(PUBLISHED) == ["5.10.4", "5.23.0"]
