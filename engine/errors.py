"""One exception hierarchy for the engine; each message tells the operator what to do."""

from __future__ import annotations

__all__ = ["EngineError", "ModelError", "UnsupportedModelError"]


class EngineError(Exception):
    """Base of all errors the engine raises on purpose."""


class ModelError(EngineError):
    """The model cannot be fetched, converted or loaded."""


class UnsupportedModelError(ModelError):
    """The model could be loaded, but paged attention would not reproduce its output exactly."""
