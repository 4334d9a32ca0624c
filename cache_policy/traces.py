"""Key traces: which blocks each request asked for, without a word of its text.

Two formats, told apart by their first character, each also gzipped:

* One JSON object a line, as the Mooncake traces have it (Qin et al., FAST'25): ``input_length`` in tokens and
  ``hash_ids``, one id per block, where equal ids stand for equal whole prefixes. Ids are integers or strings. The
  gateway's own recordings add ``block_size``, the tokens per block, which else is inferred; other fields are ignored.
* One id a line, as libCacheSim reads it: every line is a request for one block of one token.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
from msgspec import Meta

__all__ = ["Trace", "TraceError", "infer_block_size", "read_trace"]

_GZIP_MAGIC: Final = b"\x1f\x8b"
_BLOCK_SIZES: Final = tuple(2**power for power in range(21))
_EXPECTED: Final = "expected an object with input_length and hash_ids; a log of request bodies is for headstart analyze"
_HEADERS: Final = frozenset({"id", "key", "obj_id", "object_id"})


class TraceError(ValueError):
    """A trace cannot be read or replayed; the message names file, line and field."""


class Trace(msgspec.Struct, frozen=True):
    """Requests in the order of the file, their blocks numbered from 0 in the order of first use.

    ``requests`` holds each request's block numbers, first to last, ``lengths`` its tokens. ``parents`` holds for each
    block number the block before it, -1 at a root. ``conflict`` says where an id follows another one than before, so
    that ids are no prefixes; None when they are. ``block_size`` is in tokens.
    """

    name: str
    requests: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    block_size: int
    conflict: str | None = None

    @property
    def unique_blocks(self) -> int:
        """Different blocks: the size of a cache that never evicts."""
        return len(self.parents)

    @property
    def accesses(self) -> int:
        """Blocks asked for, each as often as it was."""
        return sum(map(len, self.requests))

    @property
    def tokens(self) -> int:
        """Input tokens of all requests."""
        return sum(self.lengths)


class _Line(msgspec.Struct):
    input_length: int
    hash_ids: list[int | str]
    block_size: Annotated[int, Meta(ge=1)] | None = None


_Request = tuple[int, int, Sequence[int | str], int | None]
"""Line number, tokens, ids, and tokens per block where the line says so."""


def read_trace(path: Path, block_size: int | None = None, progress: Callable[[float], None] | None = None) -> Trace:
    """Read a trace file.

    Args:
        path: the file; gzip is recognized by its content.
        block_size: tokens per block; None takes what the lines say, else infers it (see ``infer_block_size``).
        progress: called with the fraction of the file that has been read.

    Raises:
        TraceError: the file cannot be read, is empty, or a line is malformed.
    """
    numbers: dict[int | str, int] = {}
    parents: list[int] = []
    requests: list[tuple[int, ...]] = []
    lengths: list[int] = []
    lines: list[int] = []
    conflict: str | None = None
    declared: set[int | None] = set()
    seen: dict[int, int] = {}  # block -> request that first used it, to word a conflict
    try:
        for line, length, ids, size in _parse(path, progress):
            declared.add(size)
            if len(declared) > 1:
                raise TraceError(f"{path}: line {line}, field block_size: is {size}, unlike on the lines before")
            parent = -1
            request: list[int] = []
            for place, key in enumerate(ids):
                block = numbers.get(key)
                if block is None:
                    block = numbers[key] = len(parents)
                    parents.append(parent)
                    seen[block] = line
                elif parents[block] != parent and conflict is None:
                    conflict = (
                        f"{path}: line {line}, field hash_ids[{place}]: id {key!r} stands after another block than on "
                        f"line {seen[block]}, so ids are no prefixes here; replay it with object semantics"
                    )
                request.append(block)
                parent = block
            requests.append(tuple(request))
            lengths.append(length)
            lines.append(line)
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    counts = [len(request) for request in requests]
    block_size = block_size or declared.pop()
    if block_size is None:
        block_size = _infer(path, counts, lengths)
    else:
        for line, count, length in zip(lines, counts, lengths, strict=True):
            if count > -(-length // block_size):
                raise TraceError(
                    f"{path}: line {line}, field hash_ids: {count} blocks of {block_size} tokens are more than "
                    f"input_length {length} fills"
                )
    return Trace(path.name, tuple(requests), tuple(lengths), tuple(parents), block_size, conflict)


def infer_block_size(counts: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """The powers of two that explain how many blocks the requests have: all of them rounded up, or all rounded down.

    One answer is the block size; several or none leave it open. ``counts`` are blocks, ``lengths`` tokens per request.
    """
    pairs = set(zip(counts, lengths, strict=True))
    return tuple(
        size
        for size in _BLOCK_SIZES
        if all(count == length // size for count, length in pairs)
        or all(count == -(-length // size) for count, length in pairs)
    )


def _infer(path: Path, counts: Sequence[int], lengths: Sequence[int]) -> int:
    if set(lengths) == set(counts) == {1}:
        return 1  # as in a file of one id a line; any other size would give the same
    sizes = infer_block_size(counts, lengths)
    if len(sizes) == 1:
        return sizes[0]
    found = f"{', '.join(map(str, sizes))} all fit" if sizes else "no power of two fits"
    raise TraceError(
        f"{path}: fields input_length and hash_ids: tokens per block cannot be told from them ({found}); "
        "say it with --trace-block-size"
    )


def _parse(path: Path, progress: Callable[[float], None] | None) -> Iterator[_Request]:
    """What each line says."""
    with path.open("rb") as file:
        size = max(1, path.stat().st_size)
        packed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        content: BinaryIO = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
        decoder = msgspec.json.Decoder(_Line)
        is_json: bool | None = None
        for line, raw in enumerate(content, 1):
            text = raw.strip()
            if not text:
                continue
            if is_json is None:
                is_json = text.startswith(b"{")
                if not is_json and text.decode("utf-8", "replace").strip('"').lower() in _HEADERS:
                    continue
            yield _json_line(path, line, text, decoder) if is_json else _id_line(path, line, text)
            if progress is not None and line % 1024 == 0:
                progress(file.tell() / size)


def _json_line(path: Path, line: int, text: bytes, decoder: msgspec.json.Decoder[_Line]) -> _Request:
    try:
        request = decoder.decode(text)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        if field := place.rstrip("`").lstrip("."):
            raise TraceError(f"{path}: line {line}, field {_place(text, field)}: {reason}") from None
        raise TraceError(f"{path}: line {line}: {reason} ({_EXPECTED})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: line {line}: {error} ({_EXPECTED})") from None
    if request.input_length < 0:
        raise TraceError(f"{path}: line {line}, field input_length: must not be negative, is {request.input_length}")
    if len(set(request.hash_ids)) < len(request.hash_ids):
        raise TraceError(f"{path}: line {line}, field hash_ids: an id stands twice in one request")
    return line, request.input_length, request.hash_ids, request.block_size


def _place(text: bytes, field: str) -> str:
    """``hash_ids[...]`` with the number of the first id that is at fault."""
    name, bracket, _ = field.partition("[")
    if not bracket:
        return field
    ids = msgspec.json.decode(text)[name]
    wrong = (place for place, key in enumerate(ids) if not isinstance(key, int | str) or isinstance(key, bool))
    return f"{name}[{next(wrong, '...')}]"


def _id_line(path: Path, line: int, text: bytes) -> _Request:
    if b"," in text:
        raise TraceError(f"{path}: line {line}, field id: one id a line, without columns, is expected")
    return line, 1, (text.decode("utf-8", "replace"),), None
