"""The arguments of the attention-mass kernels.

Strides are in bytes. Importing this does not import Numba.
"""

from ..arguments import CHANNELS, MATRIX, VECTOR, Arguments, Block

NO_NOISE, GUMBEL, GAUSSIAN = 0, 1, 2
"""Kinds of noise; constant noise changes no softmax."""

NUMBERS, PAIRS, TILES = 0, 1, 2
"""What is multiplied at once: fp32 numbers, pairs of bf16 numbers, or tiles of pairs."""

OPTIONS = Block(  # addresses are 0 where an option is not set
    bias=MATRIX,  # fp32 [B, Hq, N]
    visible=MATRIX,  # bool [B, Hk, N], False hides a key
    row_weights=VECTOR,  # fp32 [B, T], factors of query rows
    key_index=MATRIX,  # int32 [B, Hk, N], what a key's noise depends on
    noise=int,
    seed=int,
    first_query=int,  # index of the first query, what its noise depends on
    fixed_noise=int,  # 1: one noise per key for all queries
)

PANELS = Arguments(  # keys as fp32 panels [N / panel, D, panel]
    batch=int,
    tokens=int,
    head_dim=int,
    first_head=int,  # key/value heads first_head to end_head
    end_head=int,
    dtype_code=int,  # of keys
    keys=CHANNELS,
    panels=int,
)

MASS = Arguments(
    batch=int,
    group=int,  # query heads per key/value head
    queries=int,
    tokens=int,
    head_dim=int,
    first_head=int,
    end_head=int,
    query_heads=int,
    splits=int,  # tasks per head
    blocks=int,  # blocks of query rows that a task holds at once
    dtype_code=int,  # of queries
    q=CHANNELS,
    panels=int,
    mass=int,  # fp32 [splits, B, Hq, tiles of keys]
    scratch=int,  # one area per thread
    scratch_bytes=int,
    other_lse=int,  # fp32 [B, Hq, T] of other keys, or 0: causal
    reduce_max=int,  # 1: the largest weight of any row in place of the sum
    scale=float,
    softcap=float,  # 0: none
    inverse_tau=float,
    options=OPTIONS,
)

STEP_MASS = Arguments(
    batch=int,
    group=int,
    queries=int,
    tokens=int,
    query_heads=int,
    products=int,  # fp32 [B, Hq, T, N and padding]
    product_row=int,  # bytes of a row
    mass=int,  # fp32 [B, Hq, N padded]
    scratch=int,
    scratch_bytes=int,
    softcap=float,
    inverse_tau=float,
    options=OPTIONS,
)

LOWEST = Arguments(
    heads=int,  # batch rows times heads
    tokens=int,
    before=int,  # only tokens with a smaller index
    scores=int,  # fp32 [heads, N]
    index=int,  # int32 [heads, N]
    visible=int,  # bool [heads, N], or 0
    slots=int,  # result: int64 [heads]
)
