"""Positional encodings of keys: rotary embedding and ALiBi."""
