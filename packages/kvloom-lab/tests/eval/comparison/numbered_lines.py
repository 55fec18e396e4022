"""A text of numbered lines, which a tokenizer of 600 tokens covers."""

from kvloom_lab.workload import facts as tasks

WORDS = " ".join(tasks.WORDS)
TEXT = "".join(f"line {i}: {tasks.WORDS[i * 7 % 90]} is at {i * 7919}.\n" for i in range(600))
