"""The prefix-caching RAG gateway: OpenAI API, canonicalization, routing, statistics, dashboard, command line."""

__version__ = "0.1.0"
