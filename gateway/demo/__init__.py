"""A real RAG application that needs no download: "ask the Python standard library", as written and canonicalized."""
