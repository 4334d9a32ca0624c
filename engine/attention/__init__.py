"""Paged attention behind the attention interface of transformers."""
