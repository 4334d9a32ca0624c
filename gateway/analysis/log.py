"""Request bodies from a file: one ``/v1/chat/completions`` body a line, also gzipped."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from gateway.api.decoding import decode_body
from gateway.errors import HeadstartError, InvalidRequestError
from gateway.schema import ChatRequest

__all__ = ["BadLine", "LogError", "LoggedRequest", "read_bodies", "read_lines"]

_GZIP_MAGIC: Final = b"\x1f\x8b"
_READ_AT_ONCE: Final = 1 << 18


class LogError(HeadstartError):
    """The log cannot be read at all."""


class LoggedRequest(ChatRequest, frozen=True, kw_only=True):
    """A logged body. Its ``model`` is of no account, right or wrong or missing: all requests go to one."""

    model: str = msgspec.field(default="", name="(none)")


class BadLine(msgspec.Struct, frozen=True):
    """A line that is no request: where it is, and what is wrong. ``field`` is None when it is no JSON object at all."""

    file: str
    line: int
    field: str | None
    reason: str

    @classmethod
    def of(cls, file: str, line: int, error: InvalidRequestError) -> BadLine:
        """From the error that the API would have answered with."""
        return cls(file, line, error.param, error.message.removeprefix(f"{error.param}: "))

    def __str__(self) -> str:
        place = f", field {self.field}" if self.field else ""
        return f"{self.file}: line {self.line}{place}: {self.reason}"


_decoder: Final = msgspec.json.Decoder(LoggedRequest)


def read_lines(path: Path, name: str, progress: Callable[[float], None]) -> Iterator[tuple[int, bytes]]:
    """Every line of a file as it stands there, with its number from 1.

    Args:
        path: the file; gzip is recognized by its content.
        name: what to call it.
        progress: called now and then with the fraction of the file that has been read.

    Raises:
        LogError: the file cannot be read to its end.
    """
    try:
        with path.open("rb", buffering=_READ_AT_ONCE) as file:
            size = max(1, path.stat().st_size)
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            content: BinaryIO = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
            for line, text in enumerate(content, 1):
                yield line, text
                if line % 64 == 0:
                    progress(min(1.0, file.tell() / size))
    except (OSError, EOFError) as error:
        raise LogError(f"{name}: cannot be read: {error}.") from None


def read_bodies(
    path: Path, name: str, progress: Callable[[float], None], only: Collection[int] | None = None
) -> Iterator[tuple[int, LoggedRequest | BadLine]]:
    """Every line that is not empty, with its number: a body, or what is wrong with it.

    ``only`` are the numbers of the lines that are wanted; None wants all. All else is as in ``read_lines``.
    """
    for line, text in read_lines(path, name, progress):
        if (only is None or line in only) and not text.isspace():
            try:
                yield line, decode_body(_decoder, text)
            except InvalidRequestError as error:
                yield line, BadLine.of(name, line, error)
