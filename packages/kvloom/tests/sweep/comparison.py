"""What `full` gives on a small model of each architecture, against plain transformers."""

from __future__ import annotations

import re
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import images
import shrink
import torch
import transformers
from by_hand import EAGER
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import kvloom

ROWS, TOKENS, PADDING, STEPS = 3, 47, (0, 9, 30), 12
TOLERANCE = 1e-5  # of the largest logit
SECONDS = 60  # for one form of a model
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
IMAGE = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
EQUAL, REFUSED, PLAIN_FAILS = "equal", "refused", "plain fails"
DIFFERENT, UNUSED, CRASH, NOT_BUILT = "different", "unused", "crash", "not built"


class Run(NamedTuple):
    """Tokens [R, T + steps], logits of the steps [R, steps, V] and of a direct call [N, V]."""

    tokens: Tensor
    steps: Tensor
    direct: Tensor


class Overtime(BaseException):
    """A model took too long; no handler of `Exception` catches it."""


def models() -> list[tuple[str, str]]:
    """Return (model type, class name) of every causal and image-text model, each once."""
    pairs = [(model_type, _first(names)) for model_type, names in CAUSAL.items()]
    pairs += [(model_type, _first(names)) for model_type, names in IMAGE.items()]
    return list(dict.fromkeys(pairs))


def _first(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else names[0]


def outcomes(model_type: str, class_name: str) -> list[dict[str, Any]]:
    """Return a record of each form of a model: its outcome, and the detail and figures of it."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records = [record(model_type, class_name)]
        if "prompt" not in records[0]:  # not built, or plain transformers fails
            return records
        if records[0]["prompt"] != "image" and (model_type, class_name) in image_models():
            found = record(model_type, class_name, "image")
            records += [found] if found["outcome"] != PLAIN_FAILS else []
        base = shrink.config(model_type)
        if isinstance(base, getattr(transformers, class_name).config_class):
            for name, changes in shrink.forms(base):
                found = record(model_type, class_name, name, changes)
                if found["outcome"] not in (NOT_BUILT, PLAIN_FAILS) or name not in shrink.WINDOWS:
                    records.append(found)
    return records


def image_models() -> set[tuple[str, str]]:
    return {(model_type, _first(names)) for model_type, names in IMAGE.items()}


def record(
    model_type: str, class_name: str, form: str = "", changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what one form of a model gives."""
    result = start_of_record(model_type, class_name, form)
    start = time.perf_counter()
    try:
        with _limit(SECONDS):
            result |= _outcome(model_type, class_name, form == "image", changes or {})
    except (Exception, Overtime) as caught:
        result |= {"outcome": CRASH, "detail": _text(caught)}
    return {**result, "seconds": round(time.perf_counter() - start, 2)}


def start_of_record(model_type: str, class_name: str, form: str = "") -> dict[str, Any]:
    """Return what names a form of a model, and the group that lists it."""
    group = "causal" if _first(CAUSAL.get(model_type, "")) == class_name else "image-text"
    return {"type": model_type, "class": class_name, "group": group, "form": form}


def _outcome(
    model_type: str, class_name: str, image: bool, changes: dict[str, Any]
) -> dict[str, Any]:
    try:
        model = build(model_type, class_name, changes)
    except Exception as caught:
        return {"outcome": NOT_BUILT, "detail": _text(caught)}
    result: dict[str, Any] = {
        "layers": shrink.layer_kinds(model.config),
        "attention": model.config._attn_implementation,
    }
    failure = "no image prompt fits"
    for i, (name, inputs) in enumerate(_prompts(model, image)):
        try:
            plain = run(model, inputs)
        except Exception as caught:
            failure = _text(caught) if i == 0 else failure
        else:
            check = name != "image"  # by random tokens, which may not be enough for such a model
            return {**result, "prompt": name, **_against(model, inputs, plain, check)}
    return {**result, "outcome": PLAIN_FAILS, "detail": failure}


def build(model_type: str, class_name: str, changes: dict[str, Any]) -> PreTrainedModel:
    """Return a small model in eval mode, fp32, with weights large enough for attention to matter.

    Parameters that are drawn as constants, such as biases, get noise: leaving one out would not
    show.
    """
    torch.manual_seed(0)
    cls = getattr(transformers, class_name)
    config = shrink.config(model_type, **changes)
    if not isinstance(config, cls.config_class):
        text = config.get_text_config(decoder=True)
        config = text if isinstance(text, cls.config_class) else config
    eager = {"attn_implementation": "eager"} if model_type in EAGER else {}
    model = cls._from_config(config, dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            if "sink" in name or not parameter.abs().max() < 1e3:  # memory that nothing filled
                parameter.normal_()
            elif parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif parameter.dim() == 2:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None  # random models: never stop early
    model.generation_config.pad_token_id = 0
    model.generation_config.bos_token_id = model.generation_config.decoder_start_token_id = 1
    return model


def _prompts(model: PreTrainedModel, image: bool) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the prompts to try: left-padded, of one length, with an image."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(10, 160, (ROWS, TOKENS), generator=generator)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded = {name: value.clone() for name, value in whole.items()}
    for row, pad in enumerate(PADDING):
        padded["input_ids"][row, :pad] = padded["attention_mask"][row, :pad] = 0
    if not image:
        yield "padded", padded
        yield "not padded", whole
    for inputs in images.prompts(model, padded):
        yield "image", inputs


def run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Run:
    """Generate greedily and call the model directly; raises `FloatingPointError` at NaN."""
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        if out.logits is None:
            raise TypeError("generate gives no logits")
        steps = torch.stack(out.logits, 1).float()
        direct = steps if model.config.is_encoder_decoder else model(**inputs).logits.float()
    mask = inputs.get("attention_mask")
    if mask is not None and direct.shape[:2] == mask.shape:
        direct = direct[mask.bool()]
    if not (torch.isfinite(steps).all() and torch.isfinite(direct).all()):
        raise FloatingPointError("the logits of the small model are not finite")
    return Run(out.sequences, steps, direct)


def _against(
    model: PreTrainedModel, inputs: dict[str, Tensor], plain: Run, check: bool
) -> dict[str, Any]:
    """Return what the attached model gives against `plain`, and how far `plain` sees.

    check: as for `kvloom.attach`.
    """
    result: dict[str, Any] = {"reach": _reach(model, inputs)}
    stage = "attach"
    try:
        report = kvloom.attach(model, "full", check=check)
        result["compressed"] = len(report.compressed)
        stage = "generate"
        with _counted() as caches:
            attached = run(model, inputs)
        result |= _compared(plain, attached, caches)
    except Exception as caught:
        own = type(caught).__module__ == "kvloom.errors"
        result |= {"outcome": REFUSED if own else CRASH, "at": stage, "detail": _text(caught)}
    if stage == "generate":
        kvloom.detach(model)
    after = difference(plain, run(model, inputs))
    if after > 0:
        result |= {"outcome": DIFFERENT, "detail": f"plain logits differ afterwards: {after:.1e}"}
    return result


def _compared(plain: Run, attached: Run, caches: list) -> dict[str, Any]:
    """Return the outcome of a run that raised nothing; caches: the kvloom caches that it made."""
    share = difference(plain, attached)
    if share >= TOLERANCE or not torch.equal(plain.tokens, attached.tokens):
        return {"outcome": DIFFERENT, "difference": share}
    if not any(cache.get_seq_length() for cache in caches):
        return {"outcome": UNUSED, "detail": "the model stored no token in a kvloom cache"}
    return {"outcome": EQUAL, "difference": share}


def difference(plain: Run, other: Run) -> float:
    """Return the largest difference of logits, as a share of the largest logit.

    Behind the first token that differs, steps have other inputs and are left out.
    """
    same = (plain.tokens == other.tokens).all(0)[-STEPS:].long().cumprod(0)
    count = min(int(same.sum()) + 1, STEPS)
    pairs = (plain.steps[:, :count], other.steps[:, :count]), (plain.direct, other.direct)
    return max(float((a - b).abs().max() / _largest(a)) for a, b in pairs)


def _largest(logits: Tensor) -> Tensor:
    """Return the largest logit by absolute value, but for those of suppressed tokens."""
    size = logits.abs()
    return size[size < 1e9].max()


def _reach(model: PreTrainedModel, inputs: dict[str, Tensor]) -> float | None:
    """Return how much the newest logits depend on the oldest token, as a share of the largest.

    None for an encoder-decoder model.
    """
    if model.config.is_encoder_decoder:
        return None
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, 0] = 5 + changed["input_ids"][0, 0]
    with torch.no_grad():
        one, other = model(**inputs).logits[0, -1], model(**changed).logits[0, -1]
    return float((one - other).abs().max() / _largest(one))


@contextmanager
def _counted() -> Iterator[list]:
    """Yield a list that gets every kvloom cache that is made."""
    caches, init = [], kvloom.Cache.__init__

    def count(cache, *arguments, **named):
        caches.append(cache)
        init(cache, *arguments, **named)

    kvloom.Cache.__init__ = count
    try:
        yield caches
    finally:
        kvloom.Cache.__init__ = init


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise `Overtime` in a block that takes longer."""

    def stop(*_):
        raise Overtime(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _text(caught: BaseException) -> str:
    """Return an error in one line, with its place in the source where it is not kvloom's own."""
    message = re.sub(r"\s+", " ", str(caught)).strip()
    message = message if len(message) <= 300 else f"{message[:297]}..."
    if type(caught).__module__ == "kvloom.errors":
        return f"{type(caught).__name__}: {message}"
    frame = traceback.extract_tb(caught.__traceback__)[-1]
    place = "/".join(frame.filename.split("/")[-2:])
    return f"{type(caught).__name__}: {message} ({place})"
