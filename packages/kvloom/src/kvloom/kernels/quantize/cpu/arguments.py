"""The arguments of the pack and unpack kernels.

Strides are in bytes. Importing this does not import Numba.
"""

from ...arguments import CHANNELS, MATRIX, TOKENS, Arguments, Block

CHANNEL, TOKEN, MAPPED, STATIC, ROTATED = range(5)
"""What shares a scale: tokens of a channel; channels of a token; any channels of all heads of a
token; nothing, scales are static; rotated channels of a token."""

SPEC = Block(
    tile=int,  # tokens of a task
    sharing=int,  # CHANNEL .. ROTATED
    group=int,
    groups=int,  # scales of a token, or of a group of tokens
    bits_x2=int,
    top=int,  # the highest code
    per_block=int,  # tokens of a pack block
    block_rows=int,  # its byte rows
    meta=int,  # dtype code of scales and zeros
)

TABLES = Block(  # addresses of a spec's tables, or 0
    group_of=int,  # int32 [Hk, D padded], the group of each channel
    slots=int,  # int32, the channels of the first group, then those of the next, in sixteens
    slot_ends=int,  # int32 [groups], where a group ends among them
    clip=int,  # fp32 [groups]
    divisor=int,  # fp32 [Hk, D padded]
)

ROTATION = Block(
    size=int,  # the largest power of 2 that divides a group
    signs=int,
    mix=int,
    levels=int,
    level_ends=int,
)

ROPE = Block(cos=int, sin=int, batch=int, head=int, half=int, interleaved=int)

PACK = Arguments(
    batch=int,
    heads=int,
    joint_heads=int,  # heads whose channels form one row: all of them if groups span heads, else 1
    head_dim=int,
    begin=int,  # tokens packed before these
    tokens=int,
    spec=SPEC,
    dtype_code=int,  # of the tokens
    tables=TABLES,
    static_scale=int,  # fp32 [Hk, D padded], or 0
    static_zero=int,
    x=CHANNELS,  # [B, Hk, T, D], read by pack and written by unpack
    codes=TOKENS,
    scale=MATRIX,
    zero=MATRIX,
    nonpadding=MATRIX,  # bool [B, 1 or Hk, T], address 0: all tokens count
    rope=ROPE,
    rotation=ROTATION,
)
