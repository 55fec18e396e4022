"""Registries of a recipe's parts, open to plugins, and the type check of a part's fields."""

from .fields import check_fields
from .plugins import GROUP, load_plugins
from .registry import Registry

__all__ = ["GROUP", "Registry", "check_fields", "load_plugins"]
