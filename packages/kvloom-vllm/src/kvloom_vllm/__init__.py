"""kvloom's packed KV cache inside an unmodified vLLM.

vLLM loads `plugin.register` by its entry point. Without a recipe (see `request`), the plugin
changes nothing. Importing this imports neither vLLM nor torch.
"""

TESTED = ("0.32.0",)
"""The versions of vLLM that the tests run; others are refused."""
