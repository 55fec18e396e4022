"""CPU kernels compiled by Numba of the `append` family."""
