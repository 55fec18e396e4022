"""Damaged and hostile copies of files: of their bytes, and of numbers and words in their text."""

from __future__ import annotations

import re
from random import Random

NUMBERS = [
    b"0", b"-1", b"1e999", b"NaN", b"-Infinity", b"1" * 5000, b"18446744073709551616", b"3.5",
    b"9223372036854775807", b"4294967296", b"true", b"null", b'"text"', b"[]", b"{}",
]  # fmt: skip
WORDS = [
    b"", b"\0", b"\\u0000", b"\\ud800", b"</script><script>alert(1)</script>", b"x" * 100_000,
    b"../../etc/passwd", b"{0}", b"%s%s%n", b"__import__('os').system('true')", b"\n", b"\xff\xfe",
    b"!!python/object/apply:os.system [true]",
]  # fmt: skip
NESTED = [b"[" * 100_000, b"{" * 100_000, b'{"a":' * 50_000, b"[[" * 3000 + b"]]" * 3000]


def mutated(whole: bytes, draw: Random) -> bytes:
    """Return a copy with one change, or a few; text is changed by its numbers and words too."""
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        whole = _changed(whole, draw)
    return whole


def _changed(whole: bytes, draw: Random) -> bytes:
    """Return a copy with one change."""
    n = len(whole)
    at, more = draw.randrange(n + 1), draw.choice([1, 1, 4, 64, 5000])
    end = min(n, at + more)
    kind = draw.randrange(10)
    if kind < 3 and n:
        return flipped(whole, draw.randrange(8 * n))
    if kind == 3:
        return whole[:at]
    if kind == 4:
        return whole[:at] + whole[end:]
    if kind == 5:
        return (
            whole[:at]
            + draw.choice([bytes(more), b"\xff" * more, draw.randbytes(more)])
            + (draw.choice([whole[at:], whole[end:]]))
        )
    if kind == 6:
        return whole[:at] + whole[draw.randrange(n + 1) :][:more] + whole[end:]
    if kind == 7:
        return whole[:at] + draw.choice(NESTED) + whole[at:]
    pattern, values = (rb"-?\d+(\.\d+)?", NUMBERS) if kind == 8 else (rb"[A-Za-z_]{2,}", WORDS)
    found = list(re.finditer(pattern, whole[:100_000]))
    if not found:
        return whole + draw.choice(values)
    match = draw.choice(found)
    return whole[: match.start()] + draw.choice(values) + whole[match.end() :]


def flipped(whole: bytes, bit: int) -> bytes:
    """Return a copy with one bit flipped."""
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
