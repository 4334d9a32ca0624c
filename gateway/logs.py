"""The log: structured lines on stderr, from our own code and from the libraries alike.

Lines carry names, numbers and states. Prompts, documents, answers and keys are never given to a logger, and of an
unexpected exception only its kind and the places it came through are written, because its message may quote a value.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, Final

import structlog

__all__ = ["configure_logging", "where_from"]

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_QUIET: Final = ("uvicorn", "uvicorn.error", "asyncio", "redis", "aiohttp", "httpx", "litestar")


def configure_logging(level: str = "info") -> None:
    """Set up the log of this process: for people on a terminal, one JSON object a line elsewhere.

    Libraries are heard from ``warning`` on, whatever ``level`` says.
    """
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _strip_exception,
    ]
    human = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if human else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.add_logger_name, *shared,
                    structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        cache_logger_on_first_use=True,
    )  # fmt: skip
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("headstart").setLevel(_LEVELS[level])
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).handlers.clear()


def where_from(error: BaseException) -> str:
    """An exception for the log: its kind and the last places it came through, without its message."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__module__}.{type(error).__qualname__} at {places}"


def _strip_exception(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Exceptions that libraries log (and our own) lose their message before anything is written."""
    info = event.pop("exc_info", None)
    error: BaseException | None = None
    if isinstance(info, BaseException):
        error = info
    elif isinstance(info, tuple):
        error = info[1]
    elif info:
        error = sys.exc_info()[1]
    if error is not None:
        event["exception"] = where_from(error)
    return event
