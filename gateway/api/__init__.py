"""The HTTP edge: bodies in, OpenAI-shaped answers and errors out."""
