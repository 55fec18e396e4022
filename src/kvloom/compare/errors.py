"""The error of input that is not a recipe: files, texts, models, numbers."""

from __future__ import annotations


class InputError(ValueError):
    """A file, text, model or setting that cannot be used; one sentence with the remedy."""
