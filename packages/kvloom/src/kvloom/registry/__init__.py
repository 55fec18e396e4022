"""Registries of a recipe's parts, open to plugins, and the type check of a part's fields."""

from .fields import check_fields
from .registry import GROUP, Registry, load_plugins

__all__ = ["GROUP", "Registry", "check_fields", "load_plugins"]
