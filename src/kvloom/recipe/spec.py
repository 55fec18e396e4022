"""A recipe: which tokens stay, in what format, which of them a step reads, what is protected.

Decides nothing itself: it is the sentence that `layer.LayerCache` carries out. Recipes are plain
frozen data, validated when made, and go through a dict or TOML without loss.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import IncompatibleRecipe, RecipeError
from ..keep import SCORERS, Budget, Keep, Spare
from ..recall import INDEXES, Recall, Tier
from ..registry.fields import typed
from ..store import Packed, Store, Transform
from .geometry import Geometry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Protect:
    """Tokens that always stay, exact: the first `sinks` and the newest `recent`.

    recent: one number, or (keys, values) where the two differ, as in KIVI. spare: a rule for more
    tokens of the prompt that are not packed.
    """

    sinks: int = 0
    recent: int | tuple[int, int] = 0
    spare: Spare | None = None

    def __post_init__(self) -> None:
        typed(self, "spare")
        if isinstance(self.recent, tuple) and len(self.recent) != 2:
            raise RecipeError(f"recent={self.recent!r} is one number, or (keys, values)")
        for name, value in (("sinks", self.sinks), *(("recent", r) for r in self.recents)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise RecipeError(f"{name}={value!r} must be a whole number of tokens, 0 or more")

    @property
    def recents(self) -> tuple[int, int]:
        """Exact newest tokens of keys and of values."""
        return self.recent if isinstance(self.recent, tuple) else (self.recent, self.recent)

    @property
    def tokens(self) -> int:
        """Tokens protected in all."""
        return self.sinks + max(self.recents)


@dataclass(frozen=True)
class Recipe:
    """keep, store and recall, and what is protected from them.

    keep None: every token stays. recall None: every step reads all that is held.
    """

    keep: Keep | None = None
    store: Store = field(default_factory=Store)
    recall: Recall | None = None
    protect: Protect = field(default_factory=Protect)
    name: str = "custom"

    def __post_init__(self) -> None:
        typed(self, "keep", "store", "recall", "protect", "name")
        if self.recall is not None:
            self._check_recall(self.recall)
        if self.protect.spare is not None and (self.keep is not None or self.store.exact):
            raise RecipeError(
                "protect.spare keeps tokens from being packed: combine it with a packed store and "
                "no keep, which has a score of its own"
            )
        if self.keep is None:
            return
        if not self.store.exact and (self.keep.when != "prompt" or self.keep.by_age):
            raise RecipeError(
                "keep drops single tokens at later steps, and packed tokens cannot leave their "
                'group alone: combine keep with an exact store, or drop by score when="prompt"'
            )
        tokens = self.keep.budget.tokens
        least = self.protect.tokens if self.keep.by_age else self.protect.sinks
        if tokens is not None and tokens <= least:
            raise RecipeError(
                f"a budget of {tokens} tokens leaves nothing beside {least} protected tokens; "
                f"use {least + 1} or more"
            )

    def _check_recall(self, recall: Recall) -> None:
        keep = self.keep
        if keep is not None and (keep.by_age or keep.when != "prompt"):
            raise RecipeError(
                "recall reads a few tokens of a step, and a keep at every step scores them all and "
                'drops what the index knows: use a keep by score with when="prompt", or leave one '
                "of the two out"
            )
        if keep is not None and keep.positions != "original":
            raise RecipeError(
                f"recall reads tokens at their own positions, not positions={keep.positions!r}; "
                'use "original"'
            )
        if self.protect.spare is not None:
            raise RecipeError("recall reads packed tokens as they are: leave out protect.spare")
        if recall.tier is not None:
            self._check_tier(recall)
        protected, unit = self.always, recall.index.unit
        if recall.tokens < protected + unit:
            raise RecipeError(
                f"a budget of {recall.tokens} tokens leaves nothing to find beside {protected} "
                f"protected tokens; use {protected + unit} or more"
            )

    def _check_tier(self, recall: Recall) -> None:
        for side, fmt in self.store.sides.items():
            if fmt.transform is not None or fmt.pre_rope:
                raise RecipeError(
                    f"{side}: a tier holds packed tokens without a transform and packed after "
                    "RoPE; leave out transform and pre_rope, or the tier"
                )
        unit, step = self.store.unit, recall.index.step
        if max(unit, step) % min(unit, step):
            raise RecipeError(
                f"{step} tokens are indexed at a time and {unit} packed ones put into the tier at "
                f"a time: neither is a multiple of the other; use {unit} and {unit}, or {2 * unit}"
            )

    @property
    def front(self) -> int:
        """Tokens at the front of what a keep has left that a step reads whatever it looks for.

        The sinks; where packed tokens go into a tier, so many that what follows is whole groups.
        """
        if self.keep is None or self.recall is None:
            return 0
        unit = 1 if self.recall.tier is None else self.store.unit
        return -(-self.protect.sinks // unit) * unit

    @property
    def always(self) -> int:
        """Tokens that every step of a recipe with recall reads: sinks, or the front, and recent."""
        return max(self.protect.sinks, self.front) + max(self.protect.recents)

    @property
    def budgeted(self) -> bool:
        """Whether it has a budget: of tokens that a step recalls, or else of tokens kept."""
        return self.recall is not None or self.keep is not None

    def with_budget(self, budget: int | float, prompt_tokens: int | None = None) -> Recipe:
        """Return it with another budget, in tokens (int) or as a fraction of the prompt (float).

        A step recalls a number of tokens: for a recipe that recalls, prompt_tokens says of how many
        a fraction is taken. A recipe that is not `budgeted` stays as it is. Raises `RecipeError`
        for a budget out of range.
        """
        tokens, fraction = (budget, None) if isinstance(budget, int) else (None, budget)
        if self.recall is not None:
            if tokens is None and prompt_tokens is None:
                raise RecipeError(
                    f"a step recalls a number of tokens, not budget={budget!r} of a prompt of any "
                    "length; give a whole number, or with_budget the prompt_tokens"
                )
            tokens = Budget(tokens, fraction).resolve(prompt_tokens or 0)
            return replace(self, recall=replace(self.recall, tokens=tokens))
        if self.keep is None:
            return self
        changed = replace(self.keep.budget, tokens=tokens, fraction=fraction)
        return replace(self, keep=replace(self.keep, budget=changed))

    def problems(self, geometry: Geometry) -> list[str]:
        """Everything in this recipe that does not fit the model, one sentence each."""
        problems = self.store.problems(geometry.head_dim, geometry.kv_heads)
        if self.keep is not None and geometry.layers and self.keep.budget.tokens is not None:
            try:  # the prompt is long; a fraction's budget is known when it has come
                self.keep.rooms(1 << 30, geometry.layers)
            except RecipeError as error:
                problems.append(str(error))
        return problems

    def check(self, geometry: Geometry) -> None:
        """Raise `IncompatibleRecipe` with all problems, if there are any."""
        problems = self.problems(geometry)
        if problems:
            raise IncompatibleRecipe(self.name, problems)

    def budget_tokens(self, prompt_tokens: int) -> int:
        """Tokens a layer that keeps by age holds: its budget, never less than is protected."""
        assert self.keep is not None
        return max(self.protect.tokens, self.keep.budget.resolve(prompt_tokens))

    def nbytes(self, tokens: int, geometry: Geometry, batch: int = 1) -> int:
        """Bytes held in all layers right after a prompt of `tokens` tokens, without padding.

        Budgets that depend on the scores' variance are counted as if they were uniform.
        """
        keep, sinks, g = self.keep, self.protect.sinks, geometry
        if keep is None or keep.by_age:
            held = tokens
            if keep is not None and keep.drops(tokens):
                held = min(tokens, self.budget_tokens(tokens))
            row = self._layer_nbytes(held - min(sinks, held), g)
            row += 2 * sinks * g.kv_heads * g.head_dim * g.dtype.itemsize
            row += 8 if sinks else 0  # the row's first real token
            index = self._recalling(g.layers) * self._index_nbytes(held - min(sinks, held), 0, g)
            return (g.layers * row + g.kv_heads * index) * batch
        row, first = 0, g.layers - self._recalling(g.layers)
        for place, room in enumerate(keep.rooms(tokens, g.layers)):
            held = min(tokens, room) if keep.drops(tokens) else tokens
            row += self._layer_nbytes(held, g)
            if place >= first:
                row += g.kv_heads * self._index_nbytes(held, self.front, g)
            if keep.when == "step" and held < tokens:
                row += g.kv_heads * self._slots_nbytes(held, g)
            else:  # scores, and indices once there are gaps
                scored, placed = keep.when != "prompt", g.alibi or self.store.pre_rope
                row += g.kv_heads * 4 * held * scored
                row += g.kv_heads * 4 * held * (held < tokens and (scored or placed))
        return row * batch

    def _layer_nbytes(self, tokens: int, g: Geometry) -> int:
        """Bytes of `tokens` tokens of one row's keys and values in one layer."""
        total, least = 0, tokens
        sides = (self.store.keys, self.store.values)
        for fmt, recent in zip(sides, self.protect.recents, strict=True):
            packed = 0 if fmt is None else fmt.to_pack(tokens, recent)
            total += (tokens - packed) * g.kv_heads * g.head_dim * g.dtype.itemsize
            total += 0 if fmt is None else fmt.nbytes(packed, g.head_dim, g.kv_heads)
            least = least if fmt is None else min(least, packed)
        if self.protect.spare is not None:  # exact copies and their indices
            spared = min(self.protect.spare.tokens, least)
            total += spared * g.kv_heads * (2 * g.head_dim * g.dtype.itemsize + 4)
        return total

    def _recalling(self, layers: int) -> int:
        """How many of the layers recall."""
        return 0 if self.recall is None else max(0, layers - self.recall.full_layers)

    def _index_nbytes(self, tokens: int, front: int, g: Geometry) -> int:
        """Bytes of the index of `tokens` tokens of one head, without the first `front`."""
        if self.recall is None:
            return 0
        ready = tokens - max(self.protect.recents)
        for fmt, recent in zip(
            (self.store.keys, self.store.values), self.protect.recents, strict=True
        ):
            ready = ready if fmt is None else min(ready, fmt.to_pack(tokens, recent))
        if self.recall.tier is not None:
            ready = ready // self.store.unit * self.store.unit
        index = self.recall.index
        due = index.due(0, max(0, ready - front))
        return index.nbytes(due, g.head_dim, g.dtype.itemsize)

    def _slots_nbytes(self, room: int, g: Geometry) -> int:
        """Bytes a head's slots take beside tokens: a free one, which it is, scores, indices."""
        free = 2 * g.head_dim * g.dtype.itemsize
        return free + (room + 1) * (4 + 4) + 8

    def to_dict(self) -> dict[str, Any]:
        """Plain nested data without None and False: what `from_dict` and TOML take."""
        data = _plain(asdict(self))
        if self.recall is not None:
            data["recall"]["index"] = {"kind": self.recall.index.kind, **data["recall"]["index"]}
        for part, holder in (("keep", self.keep), ("spare", self.protect.spare)):
            if holder is not None:
                table = data["keep"] if part == "keep" else data["protect"]["spare"]
                kind = holder.scorer.kind if isinstance(holder, Keep) else holder.kind
                table["scorer"] = {"kind": kind, **table["scorer"]}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """Build from `to_dict`'s data; unknown fields are refused by name."""
        return _build(cls, data)

    def to_toml(self) -> str:
        """The recipe as a TOML document."""
        return "\n".join(_toml_lines(self.to_dict(), "")) + "\n"

    @classmethod
    def from_toml(cls, source: str | Path) -> Recipe:
        """Build from a TOML document, or from a file that holds one.

        source: the document, or the path of the file (see `is_file`). Raises `RecipeError` if the
        file cannot be read or the document is not a recipe.
        """
        if not is_file(source):
            return cls._from_document(str(source))
        try:
            return cls._from_document(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            why = f"cannot be read ({error.strerror}); give an existing TOML file"
        except UnicodeDecodeError:
            why = "is not UTF-8 text; give a TOML file"
        except RecipeError as error:
            why = f"is not a recipe: {error}"
        raise RecipeError(f"recipe file {str(source)!r} {why}")

    @classmethod
    def _from_document(cls, text: str) -> Recipe:
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"not a TOML recipe: {error}") from error


def is_file(source: str | Path) -> bool:
    """Whether this is a recipe file's path: a `Path`, a name in .toml, or any existing file."""
    if isinstance(source, Path):
        return True
    return "\n" not in source and (source.endswith(".toml") or os.path.isfile(source))


def _of_kind(name: str, given: Any) -> Any:
    """A table that says with its `kind` what it is."""
    kinds = _KINDS[name]
    kind = given.get("kind") if isinstance(given, dict) else given
    if not isinstance(kind, str) or kind not in kinds:
        raise RecipeError(f"{name} kind={kind!r} is not one of {', '.join(kinds)}")
    rest = {k: v for k, v in given.items() if k != "kind"} if isinstance(given, dict) else {}
    return _build(kinds[kind], rest, name)


def _build(cls: type, given: Any, where: str = "recipe") -> Any:
    known = {f.name: f.default is f.default_factory is MISSING for f in fields(cls)}
    if not isinstance(given, dict):
        raise RecipeError(f"{where} must be a table of {', '.join(known)}, not {given!r}")
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise RecipeError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(known)}")
    if cls is Keep:
        given = {"budget": {}, **given}
    missing = [name for name, needed in known.items() if needed and name not in given]
    if missing:
        raise RecipeError(f"{where}: {cls.__name__} needs the field {missing[0]!r}")
    built = {
        name: _of_kind(name, value)
        if name in _KINDS
        else _build(_PARTS[name], value, name)
        if name in _PARTS
        else _tuple(value)
        for name, value in given.items()
    }
    return cls(**built)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_KINDS: dict[str, dict[str, type]] = {"scorer": {**SCORERS}, "index": {**INDEXES}}
"""The fields that are tables of several kinds."""

_PARTS: dict[str, type] = {
    "keep": Keep,
    "budget": Budget,
    "store": Store,
    "keys": Packed,
    "values": Packed,
    "transform": Transform,
    "recall": Recall,
    "tier": Tier,
    "protect": Protect,
    "spare": Spare,
}
"""The fields of a recipe, at any depth, that are tables."""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None and v is not False}
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
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
