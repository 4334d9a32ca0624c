"""Getting, converting and loading models."""
