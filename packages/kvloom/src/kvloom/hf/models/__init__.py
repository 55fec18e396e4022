"""Attention modules that bypass the attention interface of transformers, one file a model type."""
