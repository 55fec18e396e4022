"""The errors a user can meet. Each message is one sentence: expected, received, remedy.

They derive from the built-in error a caller would expect (``ValueError``, ``RuntimeError``), so
code that knows nothing of kvloom can catch them too.
"""

from __future__ import annotations


class RecipeError(ValueError):
    """A recipe name, option or value that does not exist or is out of range."""


class IncompatibleRecipe(ValueError):
    """A sound recipe that does not fit this model; lists every problem at once."""

    def __init__(self, recipe: str, problems: list[str]):
        self.problems = problems
        super().__init__(f"recipe {recipe!r} does not fit this model: " + "; ".join(problems))


class UnsupportedModel(ValueError):
    """A model whose attention cannot be routed to kvloom, or that cannot be told from others."""


class CacheMisuse(RuntimeError):
    """A cache used with the wrong model, shape, dtype or order of calls."""


class TierError(RuntimeError):
    """A file or host memory that holds tokens of a cache cannot be used any more."""


class NoKernel(ValueError):
    """Kernels that are asked for by a name there is not, or that cannot run here."""


class NotFinite(ValueError):
    """NaN or infinity in keys or values."""


class CalibrationError(ValueError):
    """A calibration that is missing, damaged, of another model, or not made for a format."""


class SavedCacheError(ValueError):
    """A file of a cache that is missing, damaged, of another model or version, or not writable."""


class InputError(ValueError):
    """A file, text, model or setting that cannot be used; one sentence with the remedy."""
