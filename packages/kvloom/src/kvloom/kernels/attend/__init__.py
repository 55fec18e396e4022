"""Attention of a decode step to exact, packed and chosen tokens."""
