"""Clusters and pages of keys, and the tokens that a step reads of them."""
