"""A text of numbered lines, which a tokenizer of 600 tokens covers."""

from kvloom_lab.eval.needle_text import WORDS

WORDS = " ".join(WORDS)
TEXT = "".join(f"line {i}: {WORDS[i * 7 % 90]} is at {i * 7919}.\n" for i in range(600))
