"""Every way transformers drives a cache: it works, and `full` changes no token."""

import copy
import pickle
from xml.etree import ElementTree

import pytest
import torch
import transformers as tf
import zoo
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvloom
import probe
from backends import by_reference
from near import assert_near
from sampling import slow_except

GREEDY = {"max_new_tokens": 24, "do_sample": False}
KIVI = "kivi:group=16,residual=32"
RECORDS_WINDOWS = hasattr(DynamicSlidingWindowLayer, "activate_past_recording")


KINDS = ("llama-gqa", "gemma2", "gpt-oss", "gemma4-shared", "falcon-gqa", "bloom")
SLOW = set(zoo.ADAPTED) - {"bloom"}  # others have what these have


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in ("llama-gqa", *(["gpt-oss"] if zoo.RECORDS else []), *zoo.ADAPTED)
    ]
)
def model(request):
    return zoo.build(request.param)


def test_a_fresh_cache_for_every_generate(model):
    kvloom.attach(model, KIVI)
    first = model.generate(**zoo.batch(), **GREEDY, return_dict_in_generate=True)
    second = model.generate(**zoo.batch(), **GREEDY, return_dict_in_generate=True)
    assert first.past_key_values is not second.past_key_values
    assert torch.equal(first.sequences, second.sequences)


@by_reference
def test_the_tokenizer_of_stop_strings_reaches_no_layer():
    model = zoo.build("llama-gqa")
    plain = model.generate(**zoo.batch(), **GREEDY)
    cache, ids = kvloom.Cache(model, "full"), zoo.batch()["input_ids"]
    with torch.no_grad():
        out = model(ids, past_key_values=cache, tokenizer="any")
    assert out.logits.shape[:2] == ids.shape
    assert torch.equal(model.generate(**zoo.batch(), **GREEDY), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "recipe",
    ["quest:page=16,tokens=96", "skvq:group=16,window=16,reorder=false,clip=0.9", "clusterkv"],
)
def test_torchs_default_dtype_changes_nothing(recipe, dtype):
    model, ids = zoo.build("llama-gqa"), zoo.batch(1, 160)["input_ids"]
    found = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            cache = kvloom.Cache(model, recipe)
            with torch.no_grad():
                model(ids, past_key_values=cache)
                found.append(model(ids[:, :1], past_key_values=cache).logits)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)


def test_explicit_cache_without_attach(model):
    expected = model.generate(**zoo.batch(), **GREEDY)
    cache = kvloom.Cache(model, "full")
    assert torch.equal(model.generate(**zoo.batch(), **GREEDY, past_key_values=cache), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    assert torch.equal(model.generate(**zoo.batch(), **GREEDY), expected), "stock cache still works"


def test_a_stock_cache_given_to_an_attached_model_is_used(model):
    expected = model.generate(**zoo.batch(), **GREEDY)
    kvloom.attach(model, KIVI)
    stock = DynamicCache(config=model.config)
    assert torch.equal(model.generate(**zoo.batch(), **GREEDY, past_key_values=stock), expected)
    assert stock.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize(
    "name", slow_except(["llama-gqa", "gemma2", "gpt-oss", "gemma4-shared", *zoo.ADAPTED], *KINDS)
)
def test_no_cache_at_all(name):
    model = zoo.build(name)
    expected = model.generate(**zoo.batch(), **GREEDY, use_cache=False)
    kvloom.attach(model, KIVI)
    assert torch.equal(model.generate(**zoo.batch(), **GREEDY, use_cache=False), expected)


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["llama-gqa", "gemma2", "gemma3", "gpt-oss", "gemma4-shared", *zoo.ADAPTED], *KINDS
    ),
)
def test_stock_cache_takes_a_second_prompt_on_an_attached_model(name):
    model = zoo.build(name)
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]

    def two_prompts():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :40], past_key_values=cache)
            return model(input_ids=ids[:, 40:], past_key_values=cache).logits

    expected = two_prompts()
    kvloom.attach(model, KIVI)
    torch.testing.assert_close(two_prompts(), expected, rtol=1e-4, atol=1e-5)


def test_sampling(model):
    def sample():
        torch.manual_seed(3)
        return model.generate(
            **zoo.batch(), max_new_tokens=16, do_sample=True, top_k=20, num_return_sequences=3
        )

    expected = sample()
    kvloom.attach(model, "full")
    assert torch.equal(sample(), expected)


@pytest.mark.sample
@pytest.mark.parametrize("recipe", ["full", KIVI, "window:tokens=40"])
def test_assisted_decoding(model, recipe):
    """Drafts change no token, whatever is packed or dropped between two tokens of a draft."""
    prompt = zoo.batch(rows=1, padding=(0,))
    assistant = zoo.build("llama-gqa", seed=0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # right often, not always
    kvloom.attach(model, recipe)
    cache = kvloom.Cache(model, recipe)
    plain = model.generate(**prompt, max_new_tokens=60, do_sample=False)
    out = model.generate(
        **prompt, max_new_tokens=60, do_sample=False, assistant_model=assistant,
        past_key_values=cache,
    )  # fmt: skip
    assert out.shape == plain.shape
    assert cache.get_seq_length() == out.shape[1] - 1
    assert torch.equal(out, plain)
    assert recipe == "full" or cache.nbytes < cache.full_nbytes


def test_prompt_lookup_decoding(model):
    prompt = zoo.batch(rows=1, padding=(0,))
    model.generation_config.eos_token_id = 2  # transformers 5.10 needs one here
    lookup = {**GREEDY, "prompt_lookup_num_tokens": 3}
    greedy = model.generate(**prompt, **GREEDY)
    expected = model.generate(**prompt, **lookup, use_cache=True)  # 5.10: one too many, at times
    kvloom.attach(model, "full")
    out = model.generate(**prompt, **lookup)
    assert torch.equal(out, expected)
    assert torch.equal(out[:, : greedy.shape[1]], greedy)


def test_a_plain_turn_after_an_assisted_one_packs_again():
    """Drafts make packing wait for `crop`; a turn without drafts must not wait."""
    model = zoo.build("llama-gqa")
    model.generation_config.eos_token_id = 2  # transformers 5.10 needs one here
    ids = zoo.batch(rows=1, tokens=90, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, KIVI)
    turn = model.generate(
        ids[:, :50], max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3,
        past_key_values=cache, attention_mask=torch.ones(1, 50, dtype=torch.long),
    )  # fmt: skip
    assert all(layer.cache.recording for layer in cache.full_layers)
    longer = torch.cat([turn, ids[:, 50:]], dim=1)
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    model.generate(longer, **options, past_key_values=cache, attention_mask=torch.ones_like(longer))
    assert not any(layer.cache.recording for layer in cache.full_layers)
    assert cache.nbytes < 0.7 * cache.full_nbytes


@pytest.mark.parametrize("recipe", [KIVI, "streaming:tokens=60", "h2o:tokens=60"])
@pytest.mark.parametrize("steps", [[1] * 60, [50]], ids=["tokens", "chunk"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_calls_after_an_assisted_turn_are_those_after_a_plain_one(name, recipe, steps):
    """`generate()` has ended: nothing of what the caller reads now is a draft."""
    needs_recorded_windows(name)
    model = zoo.build(name)
    model.generation_config.eos_token_id = 2  # transformers 5.10 needs one here
    prompt = zoo.batch(rows=1, padding=(0,))
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    assisted, plain = (kvloom.Cache(model, recipe) for _ in range(2))
    model.generate(**prompt, **options, prompt_lookup_num_tokens=3, past_key_values=assisted)
    model.generate(**prompt, **options, past_key_values=plain)
    if assisted.get_seq_length() != plain.get_seq_length():
        pytest.skip("this transformers generates one token too many")
    ids = torch.randint(3, 199, (1, sum(steps)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in ids.split(steps, dim=1):
            out, expected = (model(part, past_key_values=x).logits for x in (assisted, plain))
    assert torch.allclose(out, expected, atol=1e-5)
    assert assisted.nbytes == plain.nbytes
    assert not any(layer.cache.recording for layer in assisted.full_layers)


@pytest.mark.parametrize("mask", [[[1, 1]], [[1, 0]], [[1] * 64]], ids=["short", "hides", "long"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_a_mask_of_another_length_is_cut_or_filled_as_by_transformers(name, mask):
    model = zoo.build(name)
    ids, caches = zoo.batch(rows=1, tokens=63, padding=(0,))["input_ids"], []
    with torch.no_grad():
        for cache in (kvloom.Cache(model, "full"), DynamicCache(config=model.config)):
            model(ids[:, :61], past_key_values=cache)
            options = {"attention_mask": torch.tensor(mask), "past_key_values": cache}
            caches.append(model(ids[:, 61:], **options).logits)
    assert_near(*caches, share=1e-5)


def test_a_caller_may_record_after_an_assisted_turn():
    model = zoo.build("llama-gqa")
    model.generation_config.eos_token_id = 2  # transformers 5.10 needs one here
    cache = kvloom.Cache(model, KIVI)
    options = {"max_new_tokens": 9, "do_sample": False, "prompt_lookup_num_tokens": 3}
    model.generate(**zoo.batch(rows=1, padding=(0,)), **options, past_key_values=cache)
    seen = cache.get_seq_length()
    for copied in (copy.deepcopy(cache), cache):
        copied.activate_past_recording()
        with torch.no_grad():
            for token in range(40):
                model(torch.tensor([[3 + token]]), past_key_values=copied)
        copied.crop(-40)
        assert copied.get_seq_length() == seen


def needs_recorded_windows(name):
    """Skip a model with windows where transformers cannot take tokens back out of them."""
    if name != "llama-gqa" and not RECORDS_WINDOWS:
        pytest.skip("this transformers takes no tokens back out of a sliding window")


def note_caches(model):
    """Return a list to which each cache is added that `generate()` gets from now on."""
    made, attached = [], model._kvloom.attached

    def new_cache(*arguments):
        made.append(attached.new_cache(*arguments))
        return made[-1]

    model._kvloom.attached = attached._replace(new_cache=new_cache)
    return made


@pytest.mark.sample
@pytest.mark.parametrize("recipe", ["full", KIVI, "streaming:tokens=40", "h2o:tokens=40"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("main", [None, KIVI])
def test_an_assistant_may_have_a_recipe_of_its_own(name, recipe, main):
    """transformers takes tokens back out of an assistant's cache, also out of its windows."""
    needs_recorded_windows(name)
    model, assistant = zoo.build(name), zoo.build(name)
    for each in (model, assistant):
        each.generation_config.eos_token_id = 2  # transformers 5.10 needs one here
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.mul_(1.02)
    prompt = zoo.batch(rows=1, padding=(0,))
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    if main is not None:
        kvloom.attach(model, main)
    expected = model.generate(**prompt, **options)
    kvloom.attach(assistant, recipe)
    made = note_caches(assistant)
    out = model.generate(**prompt, **options, assistant_model=assistant)
    assert torch.equal(out[:, : expected.shape[1]], expected)
    expected_caches = [recipe] if RECORDS_WINDOWS else []  # 5.10 asks for a cache of its own
    assert [cache.recipe.name for cache in made] == expected_caches


@pytest.mark.parametrize("recipe", ["full", KIVI])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_the_first_layers_may_draft(name, recipe):
    needs_recorded_windows(name)
    model = zoo.build(name)
    model.generation_config.eos_token_id = 2  # transformers 5.10 needs one here
    kvloom.attach(model, recipe)
    prompt, options = zoo.batch(rows=1, padding=(0,)), {"max_new_tokens": 14, "do_sample": False}
    expected = model.generate(**prompt, **options)
    made = note_caches(model)
    out = model.generate(**prompt, **options, assistant_early_exit=1)
    assert len(made) == 1  # of the whole model; the draft has transformers' own
    assert torch.equal(out[:, : expected.shape[1]], expected)
    assert model.config.num_hidden_layers == 3
    assert torch.equal(model.generate(**prompt, **options), expected)


@pytest.mark.sample
@pytest.mark.parametrize("recipe", ["full", KIVI, "rtn:group=16", "streaming:tokens=40"])
def test_a_second_prompt_on_the_same_cache(model, recipe):
    ids = zoo.batch(rows=1, tokens=90, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, recipe)
    turn = model.generate(ids[:, :50], **GREEDY, past_key_values=cache)
    longer = torch.cat([turn, ids[:, 50:]], dim=1)
    options = {**GREEDY, "attention_mask": torch.ones_like(longer)}  # a generated 0 is no padding
    out = model.generate(longer, **options, past_key_values=cache)
    assert out.shape[1] == longer.shape[1] + 24
    assert cache.get_seq_length() == out.shape[1] - 1
    if recipe == "full":
        kvloom.detach(model)
        assert torch.equal(out, model.generate(longer, **options))


def test_a_prompt_in_chunks(model):
    prompt = zoo.batch(tokens=100)
    expected = model.generate(**prompt, **GREEDY)
    kvloom.attach(model, "full")
    assert torch.equal(model.generate(**prompt, **GREEDY, prefill_chunk_size=30), expected)
    kvloom.detach(model)
    kvloom.attach(model, KIVI)
    out = model.generate(**prompt, **GREEDY, prefill_chunk_size=30, return_dict_in_generate=True)
    whole = model.generate(**prompt, **GREEDY, return_dict_in_generate=True)
    chunked, at_once = (probe.tokens(probe.layers(x.past_key_values)[0]) for x in (out, whole))
    assert chunked.keys.packed_count == at_once.keys.packed_count
    assert chunked.values.packed_count == at_once.values.packed_count


def test_inputs_embeds(model):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    expected = model.generate(inputs_embeds=embeds, **GREEDY)
    kvloom.attach(model, "full")
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), expected)


@pytest.mark.sample
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("recipe", ["full", KIVI, "streaming:tokens=40"])
def test_one_prefix_many_continuations(model, recipe, duplicate):
    ids = zoo.batch(rows=1, tokens=80, padding=(0,))["input_ids"]
    prefix = kvloom.Cache(model, recipe)
    with torch.no_grad():
        model(input_ids=ids[:, :60], past_key_values=prefix)
        held = prefix.nbytes
        answers = []
        for _ in range(2):
            copied = duplicate(prefix)
            answers.append(model(input_ids=ids[:, 60:], past_key_values=copied).logits)
    assert torch.equal(*answers)
    assert prefix.nbytes == held
    assert prefix.get_seq_length() == 60


def test_padding_changes_nothing_for_other_rows(model):
    """The unpadded row of a padded batch generates what it generates alone."""
    kvloom.attach(model, KIVI)
    together = zoo.batch()
    alone = {k: v[:1] for k, v in together.items()}
    assert torch.equal(model.generate(**together, **GREEDY)[:1], model.generate(**alone, **GREEDY))


@pytest.mark.sample
@pytest.mark.parametrize("recipe", ["full", "window:tokens=40", "streaming:tokens=40"])
def test_a_padded_row_generates_what_it_generates_alone(model, recipe):
    kvloom.attach(model, recipe)
    together, pads = zoo.batch(), (0, 17, 40)
    out = model.generate(**together, **GREEDY)
    for row, pad in enumerate(pads):
        alone = model.generate(together["input_ids"][row : row + 1, pad:], **GREEDY)
        assert torch.equal(out[row, pad:], alone[0])


@pytest.mark.sample
@by_reference
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(model, dtype):
    model = model.to(dtype)
    prompt = zoo.batch()
    ids, mask = prompt["input_ids"], prompt["attention_mask"]

    def logits(cache):
        """Of a prompt of 50 tokens, and of 11 more by one step each."""
        found, at = [], 0
        with torch.no_grad():
            for t in (50, *[1] * 11):
                see = {"attention_mask": mask[:, : at + t], "past_key_values": cache}
                found.append(model(input_ids=ids[:, at : at + t], **see).logits.float())
                at += t
        return torch.cat(found, dim=1)[mask.bool()]

    expected = logits(DynamicCache(config=model.config))
    for recipe in ("full", "kivi:bits=8,group=16,residual=32"):
        assert_near(logits(kvloom.Cache(model, recipe)), expected, 0.03)
    kvloom.attach(model, KIVI)
    assert model.generate(**prompt, **GREEDY).shape == (3, 85)


def test_pipeline(model):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {f"w{i}": i for i in range(199)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2")
    text = " ".join(f"w{i}" for i in range(5, 70))
    generate = pipeline("text-generation", model=model, tokenizer=fast)
    expected = generate(text, max_new_tokens=12, do_sample=False)
    kvloom.attach(model, "full")
    assert generate(text, max_new_tokens=12, do_sample=False) == expected
    kvloom.detach(model)
    kvloom.attach(model, KIVI)
    assert generate([text, text], max_new_tokens=12, do_sample=False, batch_size=2)


@pytest.mark.parametrize(
    "recipe",
    ["full", KIVI, "streaming:tokens=40", "h2o:tokens=30",
     "quest:tokens=40,page=8,sinks=4,recent=8,full_layers=0,tier=host"],
)  # fmt: skip
def test_inference_mode_comes_and_goes(recipe):
    model = zoo.build("llama-gqa")
    ids = zoo.batch(tokens=80)["input_ids"]

    def steps(modes):
        cache, at, logits = kvloom.Cache(model, recipe), 0, []
        for mode, tokens in zip(modes, [60, *[1] * 8, 12], strict=True):
            with mode():
                out = model(input_ids=ids[:, at : at + tokens], past_key_values=cache).logits
                cache.reorder_cache(torch.tensor([0, 2, 1]))
            logits.append(out.clone())
            at += tokens
        return torch.cat(logits, dim=1)

    expected = steps([torch.no_grad] * 10)
    assert torch.equal(steps([torch.inference_mode, torch.no_grad] * 5), expected)
    assert torch.equal(steps([torch.no_grad, torch.inference_mode] * 5), expected)


def test_a_copy_made_in_inference_mode_can_be_used_outside():
    model, ids = zoo.build("llama-gqa"), zoo.batch(1, 90)["input_ids"]

    def last_logits(copied_in):
        cache = kvloom.Cache(model, KIVI)
        with torch.no_grad():
            model(ids[:, :70], past_key_values=cache)
        with copied_in():
            cache = copy.deepcopy(cache)
        with torch.no_grad():
            return [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(70, 90)]

    for one, other in zip(*map(last_logits, (torch.inference_mode, torch.no_grad)), strict=True):
        assert torch.equal(one, other)


def test_crop_takes_what_goes_as_a_negative_number_and_what_stays_as_a_positive_one():
    """The second is the form before transformers 5.17."""
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, "full")
    with torch.no_grad():
        model(input_ids=zoo.batch(rows=1, tokens=30)["input_ids"], past_key_values=cache)
    for tokens, left in ((-4, 26), (21, 21), (21, 21), (40, 21), (0, 21), (-21, 0)):
        cache.crop(tokens)
        assert cache.get_seq_length() == left


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
@pytest.mark.parametrize("recipe", ["full", "snapkv:tokens=30,window=8", "streaming:tokens=40"])
def test_bytes_held_after_a_prompt(name, recipe):
    """As predicted; sliding layers hold what the next token sees, without itself."""
    model = zoo.build(name)
    ids = zoo.batch(rows=2, padding=(0, 0))["input_ids"]
    cache = kvloom.Cache(model, recipe)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    sliding = [layer for layer in cache.layers if layer not in cache.full_layers]
    stock = sum(x.untyped_storage().nbytes() for y in sliding for x in (y.keys, y.values))
    in_window = min(61, getattr(model.config, "sliding_window", 61) - 1)
    assert stock == len(sliding) * 2 * 2 * in_window * cache.geometry.kv_heads * 16 * 4
    assert cache.nbytes == stock + cache.recipe.nbytes(61, cache.geometry, 2)
    assert cache.full_nbytes == stock + 61 * cache.geometry.token_nbytes() * 2


def test_bytes_count_the_states_of_linear_attention():
    config = tf.Lfm2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=199, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    cache = kvloom.Cache(model, "full")
    with torch.no_grad():
        model(**zoo.batch(rows=2, padding=(0, 0)), past_key_values=cache)
    states = 2 * config.hidden_size * config.conv_L_cache * 4
    assert cache.nbytes == cache.full_nbytes == states + 2 * 61 * cache.geometry.token_nbytes()


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "mistral-sliding"])
def test_a_cache_shows_its_recipe_tokens_and_bytes(name):
    model = zoo.build(name)
    cache = kvloom.Cache(model, kvloom.Recipe(name="<mine>"))
    assert repr(cache) == "Cache(<mine>: 0 tokens, 0 bytes instead of 0)"
    with torch.no_grad():
        model(**zoo.batch(rows=1, tokens=1200, padding=(0,)), past_key_values=cache)
    expected = f"{cache.nbytes:,} bytes instead of {cache.full_nbytes:,}"
    assert repr(cache) == f"Cache(<mine>: 1,200 tokens, {expected})"
    cells = dict(row.itertext() for row in ElementTree.fromstring(cache._repr_html_()))
    assert cells["recipe"] == "<mine>"
    assert cells["bytes of an exact cache"] == f"{cache.full_nbytes:,}"


def test_a_cache_shows_its_rows():
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, "full")
    with torch.no_grad():
        model(**zoo.batch(), past_key_values=cache)
    assert "3 x 61 tokens" in repr(cache)


def test_training_is_left_alone(model):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]

    def loss():
        torch.manual_seed(0)  # of dropout
        return model(input_ids=ids, labels=ids).loss

    model.train()
    expected = loss()
    kvloom.attach(model, KIVI)
    trained = loss()
    trained.backward()
    torch.testing.assert_close(trained, expected)
    keys = (
        "k_proj.weight", "Wqkv.weight", "query_key_value.weight", "qkv_proj.weight",
        "kv_proj.weight", "self.key.weight",
    )  # fmt: skip
    grads = [p.grad for name, p in model.named_parameters() if name.endswith(keys)]
    assert len(grads) == 3
    assert all(grad.abs().sum() > 0 for grad in grads)
