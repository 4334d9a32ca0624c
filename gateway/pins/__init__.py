"""Pinned prefixes: what they are, where they are kept, and that every engine holds them."""
