"""kvloom's packed KV cache inside an unmodified vLLM.

vLLM loads `plugin.register` by its entry point. Nothing changes unless a recipe is asked for, see
`request`. Importing this imports neither vLLM nor torch.
"""

TESTED = ("0.32.0",)
"""The versions of vLLM that the tests run; others are refused."""
