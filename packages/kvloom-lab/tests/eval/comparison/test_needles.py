"""Needles of a comparison: what is asked, and when an answer counts."""

import pytest
import torch
from numbered_lines import TEXT, WORDS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
)

import kvloom
from kvloom.errors import InputError
from kvloom.recipe.resolve import resolve
from kvloom_lab import eval as work
from kvloom_lab.eval import Settings
from kvloom_lab.eval.comparison import (
    Haystack,
    correct_after,
    correct_inside,
    haystacks,
    question_about,
)
from kvloom_lab.eval.needle_text import fact_text
from kvloom_lab.eval.sample import Question
from kvloom_lab.workload.passes import run_alone
from kvloom_lab.workload.text import tokenize
from reference_model.tasks import Encoder, needle_fact
from reference_model.tokenizer import train_tokenizer


def test_needle_sentences_are_those_of_training():
    """With a token for every digit, a fact and its question are id for id those of `tasks`."""
    pieces = ["\n The magic number for is Question: 1 2. \n"] * 5
    tokenizer = train_tokenizer([TEXT, WORDS, *pieces], 900)
    encode = Encoder(tokenizer, tokenize(tokenizer, TEXT))
    want = needle_fact(encode, "amber", encode(*"9234567"))
    fact = tokenizer.encode(fact_text("amber", "9234567"), add_special_tokens=False)
    question = question_about(tokenizer, "amber", "9234567")
    assert (fact, question.ids) == (want.ids, want.question_ids)
    assert question.tokens == 7


def bpe(pre_tokenizer, decoder, normalizer=None):
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        core.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator([TEXT, WORDS, "The magic number for Question: 1234567"] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: bpe(pre_tokenizers.ByteLevel(), decoders.ByteLevel()), id="gpt2-like"),
        pytest.param(
            lambda: bpe(
                pre_tokenizers.Metaspace(), decoders.Metaspace(), normalizers.Replace("\n", " ")
            ),
            id="sentencepiece-like",
        ),
    ],
)
def test_needles_of_other_tokenizers_read_as_text(other):
    """Digits may share tokens and spaces may stick to them: the answer still reads as digits."""
    tokenizer = other()
    ids = tokenize(tokenizer, TEXT)
    (hay,) = haystacks(tokenizer, ids, [], context=400, questions=4, seed=3)
    assert len(hay.context_ids) == 400
    said = tokenizer.decode(hay.context_ids)
    for q in hay.questions:
        asked = tokenizer.decode(q.ids)
        key = asked.split(" for ")[1].split(" is")[0]
        assert asked.rstrip().endswith(f"The magic number for {key} is")
        assert f"The magic number for {key} is {q.expected[0]}." in said
        whole = tokenizer.encode(
            f"\nQuestion: The magic number for {key} is {q.expected[0]}", add_special_tokens=False
        )
        assert whole[: len(q.ids)] == q.ids
        answer = tokenizer.batch_decode([whole[len(q.ids) :]])[0]
        assert answer.lstrip() == q.expected[0]
        assert len(whole) == len(q.ids) + q.tokens


@pytest.mark.parametrize("ask", ["after", "inside"])
def test_an_answer_counts_when_plain_generation_gives_it(model, tokenizer, ask):
    """Questions of different lengths, side by side, after the context or as its end."""
    ids = tokenize(tokenizer, TEXT)
    (hay,) = haystacks(tokenizer, ids, [1], context=300, questions=6)
    asked = []
    for i, q in enumerate(hay.questions):
        longer = q.ids[: len(q.ids) - i % 2]
        prompt = torch.tensor([hay.context_ids + longer])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, min_new_tokens=5,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        said = tokenizer.decode(out[0, prompt.shape[1] :]).lstrip()
        answer = said if i != 2 else "not " + said
        asked.append(Question(longer, [answer], 5))
    hay = Haystack(hay.context_ids, asked)
    with torch.inference_mode():
        if ask == "after":
            cache = kvloom.Cache(model, "full")
            model(torch.tensor([hay.context_ids]), past_key_values=cache)
            work = correct_after(model, tokenizer, cache, asked, 2)
        else:
            work = correct_inside(model, tokenizer, resolve("full"), hay, 2)
        assert run_alone(model, work) == 5
    kvloom.detach(model)


def test_needles_need_room(model, tokenizer):
    with pytest.raises(InputError, match="context of 40 tokens is too short for 8 needles"):
        work.prepare(model, tokenizer, TEXT, Settings(context=40, new_tokens=32))
