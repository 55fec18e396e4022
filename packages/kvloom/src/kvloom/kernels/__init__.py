"""The operations that have compiled kernels, listed in `ops`; each family has a torch reference."""
