"""CPU kernels compiled by Numba of the `select` family."""
