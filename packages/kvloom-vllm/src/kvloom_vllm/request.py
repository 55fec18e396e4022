"""The recipe that the user configured for an engine.

`--additional-config '{"kvloom": RECIPE}'` asks one engine, KVLOOM_VLLM=RECIPE every engine of the
environment. A recipe is spelled as everywhere in kvloom: a name with options, or a TOML file.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "KVLOOM_VLLM"
KEY = "kvloom"
CONNECTOR = "KvloomStore"
"""The name of kvloom's KV connector, which uses a prompt store."""


def recipe_text(vllm_config: Any) -> str | None:
    """Return the recipe that the user configured for an engine, as spelled, or None.

    Raises `ValueError` if the two ways to ask disagree, or the value is no text.
    """
    config = vllm_config.additional_config
    given = config.get(KEY) if isinstance(config, dict) else None
    if given is not None and not (isinstance(given, str) and given.strip()):
        raise ValueError(
            f'additional_config["{KEY}"] is {given!r}, not the name of a recipe; '
            f'use {{"{KEY}": "near-lossless"}}'
        )
    from_environment = os.environ.get(VARIABLE) or None
    if given and from_environment and given != from_environment:
        raise ValueError(
            f"{VARIABLE}={from_environment!r} and additional_config {given!r} ask for two recipes; "
            "give one of them"
        )
    return given or from_environment
