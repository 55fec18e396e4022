"""What a part of a cache holds, declared once by name.

Its bytes, moves of batch rows, the undoing of a step, and its saved state follow from the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor


class Stateful:
    """A part of a cache. Each class names the attributes with its state.

    tensors: tensors, batch first. uncounted: the same, but `nbytes` leaves them out: padding masks
    that the caller made, and row numbers. counters: numbers and other plain data. children: other
    parts. A tensor or a child may be None, or a list; a tensor may be missing. fixed: whether the
    attributes of this object never change in a step; those of its children may.

    A saved state is a tree of dicts and lists of tensors, numbers, strings and None. Tensors below
    a key named "host" stay in host memory.
    """

    tensors: ClassVar[tuple[str, ...]] = ()
    uncounted: ClassVar[tuple[str, ...]] = ()
    counters: ClassVar[tuple[str, ...]] = ()
    children: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, spare room included."""
        return sum(x.nbytes for x in self.held())

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that `nbytes` counts, those of all parts included."""
        yield from self._named(self.tensors)
        for child in self._named(self.children):
            yield from child.held()

    def walk(self) -> list[Stateful]:
        """Return the objects that a step changes: this part and all parts in it."""
        objects = [] if self.fixed else [self]
        for child in self._named(self.children):
            objects += child.walk()
        return objects

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        for name in (*self.tensors, *self.uncounted):
            x = getattr(self, name, None)
            if x is not None:
                setattr(self, name, [fn(y) for y in x] if isinstance(x, list) else fn(x))
        for child in self._named(self.children):
            child.map(fn)

    def state(self) -> Any:
        """Return the state by name."""
        names = (*self.tensors, *self.uncounted, *self.counters)
        state = {name: getattr(self, name, None) for name in names}
        for name in self.children:
            child = getattr(self, name)
            if isinstance(child, list):
                state[name] = [x.state() for x in child]
            else:
                state[name] = None if child is None else child.state()
        return state

    def load_state(self, state: Any, like: Tensor | None) -> None:
        """Load a state that `state` returned.

        like: an empty tensor [B, Hk, 0, D] with the dtype and device of the layer's keys; None: the
        layer has no tokens.
        """
        for name in (*self.tensors, *self.uncounted, *self.counters):
            setattr(self, name, state[name])
        for name in self.children:
            child = getattr(self, name)
            if isinstance(child, list):
                for x, saved in zip(child, state[name], strict=True):
                    x.load_state(saved, like)
            elif child is not None:
                child.load_state(state[name], like)

    def _named(self, names: Iterable[str]) -> Iterator[Any]:
        """Yield the tensors or parts of these names that exist."""
        for name in names:
            x = getattr(self, name, None)
            if isinstance(x, list):
                yield from x
            elif x is not None:
                yield x


class StepParts:
    """The objects that a step of a layer changes, while it has this `storage` and this `finder`."""

    def __init__(self, parts: Iterable[Any], storage: Any, finder: Any) -> None:
        self.parts = list(parts)
        self.storage, self.finder = storage, finder
        self.attributes = [vars(part) for part in self.parts]  # by reference

    def __reduce__(self) -> Any:
        """Copy as None: the objects of a copied layer are others."""
        return type(None), ()


class Undo:
    """The attributes of the objects of a layer when a step began, to undo the step if it fails.

    It holds references, not copies: during a step a part replaces its tensors, or writes where
    there is no live token; it never overwrites live tokens. A buffer that grows replaces the tensor
    in its allocation, which this object refers to as well, so its old storage is freed at once.
    """

    def __init__(self, step_parts: StepParts) -> None:
        self.parts, self.attributes = step_parts.parts, step_parts.attributes
        self.before = list(map(dict.copy, step_parts.attributes))

    def __deepcopy__(self, memo: dict) -> None:
        """Return None: a copy of a cache has no step to undo."""

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that the objects had, as `Stateful.held` does; some more than once."""
        for part, before in zip(self.parts, self.before, strict=False):  # none once forgotten
            if isinstance(part, Stateful):
                former = object.__new__(type(part))
                vars(former).update(before)
                yield from former.held()

    def restore(self) -> None:
        """Give every object the attributes it had."""
        for now, before in zip(self.attributes, self.before, strict=False):  # none once forgotten
            now.clear()
            now.update(before)

    def forget(self) -> None:
        """Release the tensors that only this object references."""
        self.before = []
