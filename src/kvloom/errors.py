"""The errors that kvloom raises. Each message is one sentence: expected, received, remedy.

They derive from the built-in error that a caller would expect (``ValueError``, ``RuntimeError``),
so that code without kvloom's names can catch them too.
"""

from __future__ import annotations


class RecipeError(ValueError):
    """A recipe name, option or value that does not exist or is out of range."""


class IncompatibleRecipe(ValueError):
    """A valid recipe that does not fit this model; lists every problem at once."""

    def __init__(self, recipe: str, problems: list[str]):
        self.problems = problems
        super().__init__(f"recipe {recipe!r} does not fit this model: " + "; ".join(problems))


class UnsupportedModel(ValueError):
    """A model whose attention cannot be routed through kvloom, or that cannot be identified."""


class CacheMisuse(RuntimeError):
    """A cache used with the wrong model, shape, dtype or order of calls."""


class TierError(RuntimeError):
    """A file or host memory with tokens of a cache that cannot be used any more."""


class NoKernel(ValueError):
    """A kernel backend that does not exist, or that cannot run here."""


class NotFinite(ValueError):
    """NaN or infinity in keys or values."""


class CalibrationError(ValueError):
    """A calibration that is missing, damaged, of another model, or not made for a format."""


class SavedCacheError(ValueError):
    """A file of a cache that is missing, damaged, of another model or version, or not writable."""


class InputError(ValueError):
    """A file, text, model or setting that cannot be used; one sentence with the remedy."""
