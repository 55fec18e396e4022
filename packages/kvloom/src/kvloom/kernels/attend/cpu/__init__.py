"""CPU kernels compiled by Numba of the `attend` family."""
