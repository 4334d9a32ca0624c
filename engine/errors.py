"""One exception hierarchy for the engine; each message tells the operator what to do."""

from __future__ import annotations

__all__ = [
    "CallError",
    "EngineError",
    "InvariantError",
    "KernelError",
    "ModelError",
    "NoSpaceError",
    "PinLimitError",
    "ProtocolError",
    "UnsupportedModelError",
    "WorkerError",
    "require",
]


class EngineError(Exception):
    """Base of all errors the engine raises on purpose."""


class ModelError(EngineError):
    """The model cannot be fetched, converted or loaded."""


class UnsupportedModelError(ModelError):
    """The model could be loaded, but paged attention would not reproduce its output exactly."""


class NoSpaceError(EngineError):
    """Too few blocks are empty or idle; nothing was changed. Something has to end first."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} available")
        self.needed = needed
        self.available = available


class PinLimitError(EngineError):
    """Too many blocks would be pinned; nothing was changed."""

    def __init__(self, wanted: int, limit: int) -> None:
        super().__init__(
            f"{wanted} blocks would be pinned, at most {limit} can be: pin less, unpin something, or enlarge the pool"
        )
        self.wanted = wanted
        self.limit = limit


class InvariantError(EngineError):
    """The block manager contradicts itself: a fault in this program, never the caller's."""


class CallError(EngineError):
    """A control call cannot be carried out; the message goes to the caller."""


class ProtocolError(EngineError):
    """A peer sent a frame that ``engine.wire`` does not allow; its connection is closed."""


class WorkerError(EngineError):
    """The engine process cannot start with these options on this machine."""


class KernelError(EngineError):
    """The optional C++ kernels cannot be built or loaded; the engine computes without them."""


def require(holds: bool, invariant: str, block: int | None = None) -> None:
    """Raise ``InvariantError`` with the words of ``invariant``, and which block it is about, when it does not hold."""
    if not holds:
        where = "" if block is None else f" (block {block})"
        raise InvariantError(f"broken invariant: {invariant}{where}")
