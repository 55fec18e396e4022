"""The errors that kvloom raises. Each message is one sentence: expected, received, remedy.

All derive from `KvloomError`, and from the built-in error that a caller would expect
(``ValueError``, ``RuntimeError``).
"""

from __future__ import annotations

__all__ = [
    "CacheMisuse",
    "CalibrationError",
    "IncompatibleRecipe",
    "InputError",
    "KvloomError",
    "NoKernel",
    "NotFinite",
    "RecipeError",
    "SavedCacheError",
    "StoreError",
    "TierError",
    "UnsupportedModel",
]


class KvloomError(Exception):
    """Any error that kvloom raises."""


class RecipeError(KvloomError, ValueError):
    """A recipe name, option or value that does not exist or is out of range."""


class IncompatibleRecipe(KvloomError, ValueError):
    """A valid recipe that does not fit this model; lists every problem at once."""

    def __init__(self, recipe: str, problems: list[str]):
        self.problems = problems
        super().__init__(f"recipe {recipe!r} does not fit this model: " + "; ".join(problems))


class UnsupportedModel(KvloomError, ValueError):
    """A model whose attention cannot be routed through kvloom, or that cannot be identified."""


class CacheMisuse(KvloomError, RuntimeError):
    """A cache used with the wrong model, shape, dtype, thread or order of calls."""


class TierError(KvloomError, RuntimeError):
    """A file or host memory with tokens of a cache that cannot be used any more."""


class NoKernel(KvloomError, ValueError):
    """A kernel backend that does not exist, or that cannot run here."""


class NotFinite(KvloomError, ValueError):
    """NaN or infinity in keys or values, or numbers that are too large for the format."""


class CalibrationError(KvloomError, ValueError):
    """A calibration that is missing, damaged, of another model, or not made for a format."""


class SavedCacheError(KvloomError, ValueError):
    """A file of a cache that is missing, damaged, of another model or version, or not writable."""


class StoreError(KvloomError, RuntimeError):
    """A prompt store that cannot be used, or that cannot identify a model or a recipe."""


class InputError(KvloomError, ValueError):
    """A file, text, model or setting that cannot be used; one sentence with the remedy."""


def first_line(error: Exception) -> str:
    """Return the class of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
