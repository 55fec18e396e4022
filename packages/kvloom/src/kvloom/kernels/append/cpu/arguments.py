"""The arguments of the append kernel. Strides count numbers, not bytes. Does not import Numba."""

from ...arguments import CHANNELS, Arguments, Block

SIDE = Block(
    source=CHANNELS,  # [B, Hk, T, D]
    target=CHANNELS,  # [B, Hk, N, D]
    begin=int,  # row of the first token
    begin_per_head=int,  # address of int64 [B, Hk], added to `begin`; or 0
    max_bits=int,  # bits of the largest magnitude that is allowed
)

STEP = Arguments(
    batch=int,
    heads=int,
    tokens=int,
    head_dim=int,
    keys=SIDE,
    values=SIDE,
    exceeded=int,  # result: not 0 if a number was larger
)
