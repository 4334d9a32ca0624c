"""A paged KV-cache engine with automatic prefix caching. Knows nothing of HTTP, tenants or RAG."""
