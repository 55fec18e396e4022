"""Bytes of a model's weights, and which of them a decode step reads.

Quantized weights are counted by the tensors that their checkpoint has for a matrix. `settings` are
the model's `quantization_config`; a matrix has `rows` outputs and `columns` inputs. Refuses, by
name, quantizations whose layout is not described here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvloom.errors import UnsupportedModel

from .units import Range

Settings = dict[str, Any]


class Layout(NamedTuple):
    """How a method stores weights.

    matrix: returns the bytes of a linear layer's matrix, by settings, rows and columns; None: the
    method leaves them as they are. experts: returns the bytes of an expert's matrix, by rows and
    columns; None: how the method stores experts is not known. problem: returns why settings cannot
    be counted; None if they can. models: the model types that the method exists for; None: all.
    """

    matrix: Callable[[Settings, int, int], int] | None = None
    experts: Callable[[int, int], int] | None = None
    problem: Callable[[Settings], str | None] = lambda settings: None
    models: tuple[str, ...] | None = None


def _bits_and_bytes_4(settings: Settings, rows: int, columns: int) -> int:
    """4-bit codes; a scale for each 64 values, and with double quantization in 8 bits."""
    blocks = ceil(rows * columns / 64)
    scales = 4 * blocks
    if settings.get("bnb_4bit_use_double_quant"):
        # one fp32 scale for 256 scales, their 256 levels, and their mean
        scales = blocks + 4 * ceil(blocks / 256) + 4 * 256 + 4
    return ceil(rows * columns / 2) + scales + 4 * 16  # and the 16 levels


def _bits_and_bytes_8(settings: Settings, rows: int, columns: int) -> int:
    """8-bit codes and an fp32 scale for each row."""
    return rows * columns + 4 * rows


def _awq(settings: Settings, rows: int, columns: int) -> int:
    """Codes and zeros in int32 and fp16 scales of groups of columns (the GEMM layout)."""
    bits, group = settings.get("bits", 4), settings.get("group_size", 128)
    groups = ceil(columns / (columns if group == -1 else group))
    return rows * columns * bits // 8 + groups * rows * bits // 8 + 2 * groups * rows


def _awq_problem(settings: Settings) -> str | None:
    if str(settings.get("version", "gemm")).lower() != "gemm" or settings.get("bits", 4) != 4:
        return "AWQ in another version than gemm, or not in 4 bits, is not counted yet"
    return None


def _gptq(settings: Settings, rows: int, columns: int) -> int:
    """As AWQ, and each column's group."""
    return _awq(settings, rows, columns) + 4 * columns


def _gptq_problem(settings: Settings) -> str | None:
    if settings.get("bits") not in (2, 4, 8):
        return f"GPTQ with bits={settings.get('bits')} has a layout that is not described here"
    if settings.get("modules_in_block_to_quantize"):
        return "GPTQ with modules_in_block_to_quantize is not counted yet"
    if settings.get("lm_head"):
        return "GPTQ of the lm_head is not counted yet"
    return None


def _fp8(settings: Settings, rows: int, columns: int) -> int:
    """fp8 values and an fp32 scale for each block of the matrix (DeepSeek's layout)."""
    high, wide = settings["weight_block_size"]
    return rows * columns + 4 * ceil(rows / high) * ceil(columns / wide)


def _fp8_problem(settings: Settings) -> str | None:
    block = settings.get("weight_block_size")
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        return "fp8 without weight_block_size is not counted yet"
    if settings.get("scale_fmt", "float") not in (None, "float"):
        return f"fp8 with scale_fmt={settings['scale_fmt']!r} is not counted yet"
    if settings.get("activation_scheme", "dynamic") != "dynamic":
        return "fp8 with a static activation_scheme is not counted yet"
    return None


def _mxfp4(rows: int, columns: int) -> int:
    """4-bit floats, and an 8-bit exponent for each block of 32 columns (OCP Microscaling)."""
    return rows * ceil(columns / 32) * (16 + 1)


def _mxfp4_problem(settings: Settings) -> str | None:
    skipped = settings.get("modules_to_not_convert") or ()
    if any(name.rpartition(".")[2] in ("mlp", "experts") for name in skipped):
        return "mxfp4 that leaves experts as they are is not counted yet"
    return None


LAYOUTS = {
    "bitsandbytes-4bit": Layout(_bits_and_bytes_4),
    "bitsandbytes-8bit": Layout(_bits_and_bytes_8),
    "gptq": Layout(_gptq, problem=_gptq_problem),
    "awq": Layout(_awq, problem=_awq_problem),
    "fp8": Layout(_fp8, problem=_fp8_problem),
    "mxfp4": Layout(experts=_mxfp4, problem=_mxfp4_problem, models=("gpt_oss",)),
}
"""By the name of the method."""


@dataclass(frozen=True)
class Weights:
    """Bytes and parameters of a model's weights.

    nbytes: all weights. read, parameters: bytes that every decode step reads, and parameters that
    it multiplies with. expert_read, expert_parameters: those of all routed experts in all layers,
    of which a token uses `used` of `experts`. quantized: the method; None for plain weights.
    """

    nbytes: int
    read: int
    parameters: int
    expert_read: int = 0
    expert_parameters: int = 0
    experts: int = 0
    used: int = 0
    quantized: str | None = None

    def read_nbytes(self, batch: int) -> Range:
        """Return the bytes of weights that a decode step of `batch` rows reads.

        Which experts rows share is not known: all the same (low), none twice (high), or chosen at
        random (best).
        """
        if not self.experts:
            return Range.exactly(self.read)
        per_expert = self.expert_read / self.experts
        chance = 1 - (1 - self.used / self.experts) ** batch
        distinct = Range(self.used, self.experts * chance, min(self.experts, batch * self.used))
        return Range.exactly(self.read) + distinct.scaled(per_expert)

    def flops(self, batch: int) -> float:
        """Return the floating-point operations of a decode step's products with weights."""
        share = self.used / self.experts if self.experts else 0.0
        return 2 * batch * (self.parameters + share * self.expert_parameters)


def count_weights(model: PreTrainedModel) -> Weights:
    """Return the weights of a model on the meta device. Raises `UnsupportedModel`."""
    method, layout, settings = _layout(model)
    matrices = _quantized_matrices(model, settings) if layout.matrix else {}
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # ModernBERT's is its output layer
        decoder = model.base_model
    read = {id(p) for p in decoder.parameters()}
    output = model.get_output_embeddings()
    kept = set() if output is None else {id(p) for p in output.parameters()}
    for module in decoder.modules():
        if _encodes(module):
            read -= {id(p) for p in module.parameters()}
        elif isinstance(module, nn.Embedding):  # a step reads one row of it for a token
            read -= {id(p) for p in module.parameters()} - kept
    read |= kept
    whole = {
        id(p) for module in decoder.modules() if _reads_all(module) for p in module.parameters()
    }
    total = step = parameters = expert_step = expert_parameters = 0
    for name, weight in model.named_parameters():
        nbytes = weight.numel() * weight.element_size()
        if layout.matrix and name in matrices:
            nbytes = layout.matrix(settings, *matrices[name])
        elif layout.experts and ".experts." in name and weight.dim() == 3:
            count, columns, rows = weight.shape
            nbytes = count * layout.experts(rows, columns)
        total += nbytes
        if id(weight) not in read:
            continue
        vector = weight.numel() == max(weight.shape, default=1)
        if weight.dim() > 2 and not vector and not (".experts." in name or id(weight) in whole):
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be planned: it is not known here which part of "
                f"{name!r} a token reads"
            )
        if ".experts." in name:
            expert_step += nbytes
            expert_parameters += weight.numel()
        else:
            step += nbytes
            parameters += weight.numel() if weight.dim() > 1 else 0
    if not expert_step:
        return Weights(total, step, parameters, quantized=method)
    if method is not None and layout.experts is None:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be planned: how {method} stores experts is not known "
            "here; plan the model without its quantization_config"
        )
    experts, used = _routing(model)
    return Weights(
        total, step, parameters, expert_step, expert_parameters, experts, used, quantized=method
    )


def _reads_all(module: nn.Module) -> bool:
    """Return whether a token reads all of a module's weights, whatever their shapes."""
    return isinstance(module, nn.Conv1d) or type(module).__name__.endswith("MambaMixer")


def _encodes(module: nn.Module) -> bool:
    """Return whether a module encodes images or sound, which no decode step does."""
    return isinstance(module, PreTrainedModel) and "text" not in module.input_modalities


def _routing(model: PreTrainedModel) -> tuple[int, int]:
    """Return how many experts a layer has, and how many a token uses."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((n for name in names if (n := getattr(config, name, None))), None)
    used = next(
        (n for n in ("num_experts_per_tok", "moe_topk", "moe_k") if getattr(config, n, None)), None
    )
    if experts is None or used is None:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be planned: its config does not state how many experts "
            "a token uses in a way that kvloom reads"
        )
    return experts, getattr(config, used)


# quantized weights


def _layout(model: PreTrainedModel) -> tuple[str | None, Layout, dict[str, Any]]:
    """Return the method of quantization, None for plain weights, its layout and its settings."""
    settings = getattr(model.config, "quantization_config", None)
    if settings is None:
        return None, Layout(), {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method", "unknown"))
    method = str(getattr(settings.get("quant_method"), "value", method))
    if method == "bitsandbytes":
        method += "-4bit" if settings.get("load_in_4bit") else "-8bit"
    problem = None
    if method not in LAYOUTS:
        problem = f"weights quantized by {method} are not counted yet"
    elif model.config.get_text_config(decoder=True) is not model.config:
        problem = f"which matrices of a multimodal model {method} quantizes is not known here"
    elif model.config.model_type not in (LAYOUTS[method].models or (model.config.model_type,)):
        problem = f"which weights of a {model.config.model_type} {method} quantizes is not known"
    else:
        problem = LAYOUTS[method].problem(settings)
    if problem:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be planned: {problem}; supported are "
            f"{', '.join(LAYOUTS)} in their usual layouts"
        )
    return method, LAYOUTS[method], settings


def _quantized_matrices(
    model: PreTrainedModel, settings: dict[str, Any]
) -> dict[str, tuple[int, int]]:
    """Return (rows out, columns in) of the matrices that are quantized, by parameter name."""
    skipped = list(
        settings.get("modules_to_not_convert") or settings.get("llm_int8_skip_modules") or ()
    )
    output = model.get_output_embeddings()
    shapes = {}
    for name, module in model.named_modules():
        if module is output or any(_names(skip, name) for skip in skipped):
            continue
        if isinstance(module, nn.Linear):
            shapes[f"{name}.weight"] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            shapes[f"{name}.weight"] = (module.nf, module.nx)
    return shapes


def _names(skip: str, module: str) -> bool:
    """Return whether a setting such as "lm_head" or "layers.0.mlp" names a module."""
    return f".{skip}." in f".{module}."
