"""CPU kernels compiled by Numba of the `score` family."""
