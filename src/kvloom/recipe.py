"""A recipe: which tokens stay, in what format, which of them a step reads, what is protected.

Decides nothing itself: it is the sentence that `layer.LayerCache` carries out. Recipes are plain
frozen data, validated when made, and go through a dict or TOML without loss.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import IncompatibleRecipe, RecipeError
from .keep import SCORERS, Budget, Keep, Scorer
from .shapes import Geometry
from .store import Packed, Store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Protect:
    """Tokens that always stay, exact: the first `sinks` and the newest `recent`.

    recent: one number, or (keys, values) where the two differ, as in KIVI.
    """

    sinks: int = 0
    recent: int | tuple[int, int] = 0

    def __post_init__(self) -> None:
        for name, value in (("sinks", self.sinks), *(("recent", r) for r in self.recents)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise RecipeError(f"{name}={value!r} must be a whole number of tokens, 0 or more")

    @property
    def recents(self) -> tuple[int, int]:
        """Exact newest tokens of keys and of values."""
        return self.recent if isinstance(self.recent, tuple) else (self.recent, self.recent)


@dataclass(frozen=True)
class Recall:
    """Which stored tokens a step reads. "everything" is the only index so far."""

    index: str = "everything"

    def __post_init__(self) -> None:
        if self.index != "everything":
            raise RecipeError(f"index={self.index!r} is not one of everything")


@dataclass(frozen=True)
class Recipe:
    """keep, store and recall, and what is protected from them."""

    keep: Keep | None = None
    store: Store = field(default_factory=Store)
    recall: Recall = field(default_factory=Recall)
    protect: Protect = field(default_factory=Protect)
    name: str = "custom"

    def __post_init__(self) -> None:
        if self.keep is None:
            return
        if not self.store.exact and (self.keep.when == "step" or self.keep.by_age):
            raise RecipeError(
                "keep drops single tokens at every step, and packed tokens cannot leave their "
                'group alone: drop once (when="prompt"), or keep the store exact'
            )
        tokens = self.keep.budget.tokens
        least = self.protect.sinks + (max(self.protect.recents) if self.keep.by_age else 0)
        if tokens is not None and tokens <= least:
            raise RecipeError(
                f"a budget of {tokens} tokens leaves nothing beside {least} protected tokens; "
                f"use {least + 1} or more"
            )

    def problems(self, geometry: Geometry) -> list[str]:
        """Everything in this recipe that does not fit the model, one sentence each."""
        return self.store.problems(geometry.head_dim)

    def check(self, geometry: Geometry) -> None:
        """Raise `IncompatibleRecipe` with all problems, if there are any."""
        problems = self.problems(geometry)
        if problems:
            raise IncompatibleRecipe(self.name, problems)

    def nbytes(self, tokens: int, geometry: Geometry, batch: int = 1) -> int:
        """Bytes held in all layers right after a prompt of `tokens` tokens, without padding."""
        g, recents = geometry, self.protect.recents
        held = tokens if self.keep is None else min(tokens, self.keep.budget.resolve(tokens))
        sinks = min(self.protect.sinks, held)
        total = 0
        for fmt, recent in zip((self.store.keys, self.store.values), recents, strict=True):
            packed = 0 if fmt is None else fmt.to_pack(held - sinks, recent)
            total += (held - sinks - packed) * g.head_dim * g.dtype.itemsize
            total += self.protect.sinks * g.head_dim * g.dtype.itemsize
            if fmt is not None:
                total += fmt.nbytes(packed, g.head_dim)
        start = 8 * batch if self.protect.sinks else 0  # each row's first real token
        return g.layers * (total * g.kv_heads * batch + start)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested data without None: what `from_dict` and TOML take."""
        data = _plain(asdict(self))
        if self.keep is not None:
            data["keep"]["scorer"] = {"kind": self.keep.scorer.kind, **data["keep"]["scorer"]}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """Build from `to_dict`'s data; unknown fields are refused by name."""
        parts: dict[str, Any] = dict(data)
        if "keep" in parts:
            keep = dict(parts["keep"])
            budget = dict(keep.get("budget", {}))
            if isinstance(budget.get("layers"), list):
                budget["layers"] = tuple(budget["layers"])
            keep["budget"] = _build(Budget, budget)
            if "scorer" in keep:
                keep["scorer"] = _scorer(dict(keep["scorer"]))
            parts["keep"] = _build(Keep, keep)
        if "store" in parts:
            sides = {side: _build(Packed, fmt) for side, fmt in parts["store"].items()}
            parts["store"] = _build(Store, sides)
        if "recall" in parts:
            parts["recall"] = _build(Recall, parts["recall"])
        if "protect" in parts:
            protect = dict(parts["protect"])
            if isinstance(protect.get("recent"), list):
                protect["recent"] = tuple(protect["recent"])
            parts["protect"] = _build(Protect, protect)
        return _build(cls, parts)

    def to_toml(self) -> str:
        """The recipe as a TOML document."""
        return "\n".join(_toml_lines(self.to_dict(), "")) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Build from a TOML document."""
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"not a TOML recipe: {error}") from error


def _scorer(fields: dict[str, Any]) -> Scorer:
    kind = fields.pop("kind", None)
    if kind not in SCORERS:
        raise RecipeError(f"scorer kind={kind!r} is not one of {', '.join(SCORERS)}")
    return _build(SCORERS[kind], fields)


def _build(cls: type, fields: dict[str, Any]) -> Any:
    known = cls.__dataclass_fields__  # type: ignore[attr-defined]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise RecipeError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(known)}")
    try:
        return cls(**fields)
    except TypeError as error:
        raise RecipeError(f"{cls.__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return list(value) if isinstance(value, tuple) else value


def _toml_lines(table: dict[str, Any], path: str) -> list[str]:
    plain = {k: v for k, v in table.items() if not isinstance(v, dict)}
    lines = [f"[{path}]"] if path and plain else []
    lines += [f"{k} = {_toml_value(v)}" for k, v in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict) and value:
            below = _toml_lines(value, f"{path}.{key}" if path else key)
            lines += below if below[0] == "" else ["", *below]
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return str(value)
