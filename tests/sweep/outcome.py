"""What `full` gives on one small model, against plain transformers."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import kvloom
import shrink

ROWS, TOKENS, PADDING, STEPS = 3, 47, (0, 9, 30), 12
TOLERANCE = 1e-4  # of the largest logit
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}


def model_types() -> list[tuple[str, str]]:
    """Return (kind, model type) of every class; an image model of both kinds occurs once."""
    causal, image = (dict(KINDS[kind]) for kind in KINDS)
    return [("causal", t) for t in causal] + [
        ("image", t) for t in image if image[t] != causal.get(t)
    ]


def class_name(kind: str, model_type: str) -> str:
    name = KINDS[kind][model_type]
    return name if isinstance(name, str) else name[0]


def build(kind: str, model_type: str) -> PreTrainedModel:
    """Return a small model in eval mode, fp32, with weights large enough for attention to matter."""
    torch.manual_seed(0)
    cls = getattr(transformers, class_name(kind, model_type))
    config = shrink.config(model_type)
    if not isinstance(config, cls.config_class):
        config = config.get_text_config(decoder=True)
    model = cls._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if "sink" in name:
                parameter.normal_()
            elif parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.dim() == 2:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None  # random models: never stop early
    model.generation_config.pad_token_id = 0
    return model


def prompt(padded: bool = True) -> dict[str, torch.Tensor]:
    """Prompts of random tokens, left-padded or all of one length."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(10, 160, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row, pad in enumerate(PADDING):
            ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens [B, T + steps], logits of steps [B, steps, V] and of a direct call [real, V]."""
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        direct = model(**inputs).logits
    direct = direct[inputs["attention_mask"].bool()] if direct.shape[1] == TOKENS else direct
    return out.sequences, torch.stack(out.logits, 1), direct


def difference(plain: Any, other: Any) -> float:
    """Return the largest difference of logits, as a share of the largest logit."""
    if not torch.equal(plain[0], other[0]):
        same = (plain[0] == other[0]).all(0).long().cumprod(0).sum() - (plain[0].shape[1] - STEPS)
        steps = max(1, int(same) + 1)
    else:
        steps = STEPS
    pairs = [(plain[1][:, :steps], other[1][:, :steps]), (plain[2], other[2])]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def error(caught: BaseException) -> str:
    frame = traceback.extract_tb(caught.__traceback__)[-1]
    text = " ".join(str(caught).split())[:300]
    return f"{type(caught).__name__}: {text} [{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}]"


def outcome(kind: str, model_type: str) -> dict[str, Any]:
    """Return what a model gives: outcome, detail, and figures."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    result: dict[str, Any] = {"class": class_name(kind, model_type)}
    try:
        model = build(kind, model_type)
    except Exception as caught:
        return {**result, "outcome": "not built", "detail": error(caught)}
    result |= {"class": type(model).__name__, "attention": model.config._attn_implementation}
    text = model.config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    result["layers"] = list(types) if types else getattr(text, "num_hidden_layers", None)
    for padded in (True, False):
        inputs = prompt(padded)
        try:
            plain = run(model, inputs)
            again = difference(plain, run(model, inputs))
            if not all(torch.isfinite(x.float()).all() for x in plain):
                raise FloatingPointError("the logits are not finite")
            break
        except Exception as caught:
            result |= {"outcome": "plain fails", "detail": error(caught)}
    else:
        return result
    result |= {"padded": padded, "plain_again": again}
    stage = "attach"
    try:
        kvloom.attach(model, "full")
        stage = "generate"
        attached = run(model, inputs)
        stage = "detach"
        kvloom.detach(model)
        back = difference(plain, run(model, inputs))
    except Exception as caught:
        known = type(caught).__module__.startswith("kvloom.")
        return {**result, "outcome": "refused" if known else "crash", "at": stage, "detail": error(caught)}
    share = difference(plain, attached)
    equal = share < TOLERANCE and torch.equal(plain[0], attached[0])
    result |= {"outcome": "equal" if equal else "different", "difference": share, "after_detach": back}
    return result
