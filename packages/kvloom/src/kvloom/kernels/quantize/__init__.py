"""Packing tokens into codes, scales and zeros, and unpacking them."""

import sys

from ... import encoding

sys.modules[f"{__name__}.encoding"] = encoding  # its former place, in pickles
