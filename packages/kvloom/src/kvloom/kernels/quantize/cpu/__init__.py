"""CPU kernels compiled by Numba of the `quantize` family."""
