"""Records the traffic as a key trace, which ``headstart simulate`` reads: block ids, lengths and times, never text.

A line of JSON per answered request, with the field names of the Mooncake traces (Qin et al., FAST'25): ``timestamp``
(milliseconds since the epoch), ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one per full block; equal
ids stand for equal whole prefixes of one tenant), ``block_size`` (tokens), ``template`` and ``tenant``. The ids are cut
out of block keys, which nobody without the deployment secret can compute from a text.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import structlog

from gateway.config import TraceConfig

__all__ = ["TraceRecorder"]

_FLUSH_S: Final = 1.0
_MOST_LINES: Final = 20_000
"""So many lines wait for the disk at most; what comes beyond is not recorded, and counted."""

_CURRENT: Final = "trace.jsonl"
_FULL: Final = "trace-*.jsonl.gz"

_encode: Final = msgspec.json.Encoder().encode
_log = structlog.get_logger("headstart.trace")


class _Line(msgspec.Struct, frozen=True):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int
    template: str
    tenant: str


class TraceRecorder:
    """Writes to ``trace.jsonl`` in its folder; a full one is packed to ``trace-TIME.jsonl.gz``, the oldest are deleted.

    Belongs to the event loop; the disk is touched in a thread only. When it cannot be written to (full, read-only), the
    recorder stops for good, leaves whole lines behind, and says so once in the log and in ``problem``.
    """

    def __init__(self, config: TraceConfig) -> None:
        """Nothing is opened before ``start``. ``config.folder`` must not be None."""
        assert config.folder is not None
        self._folder: Final = Path(config.folder).expanduser()
        self._max_bytes: Final = config.max_file_mb * 1024 * 1024
        self._files: Final = config.files
        self._lines: list[bytes] = []
        self._dropped = 0
        self._file: BinaryIO | None = None
        self._task: asyncio.Task[None] | None = None
        self.problem: str | None = None
        """Why nothing is recorded (any more); None while all is well."""

    async def start(self) -> None:
        """Begin to record. A folder that cannot be used is a ``problem``, not an error."""
        await self._on_disk(self._open)
        self._task = asyncio.create_task(self._flush_for_ever(), name="trace-recorder")

    async def stop(self) -> None:
        """Write what is left and close."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._flush()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
            self._file = None

    def record(
        self,
        keys: Sequence[bytes],
        *,
        input_length: int,
        output_length: int,
        block_size: int,
        template: str,
        tenant: str,
    ) -> None:
        """Add a request that has been answered; ``keys`` are the chained keys of its prompt's full blocks."""
        if self.problem is not None:
            return
        if len(self._lines) >= _MOST_LINES:
            self._dropped += 1
            return
        ids = [int.from_bytes(key[:8], "little") >> 1 for key in keys]  # 63 bits fit every reader's integers
        now = int(time.time() * 1000)
        self._lines.append(_encode(_Line(now, input_length, output_length, ids, block_size, template, tenant)) + b"\n")

    # --- inside ----------------------------------------------------------------------------------------

    async def _flush_for_ever(self) -> None:
        while self.problem is None:
            await asyncio.sleep(_FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines and self.problem is None:
            await self._on_disk(self._write, lines)
        if self._dropped:
            _log.warning("requests were not recorded: the disk is too slow", requests=self._dropped)
            self._dropped = 0

    async def _on_disk(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            await asyncio.to_thread(work, *arguments)
        except OSError as error:
            self.problem = f"traffic is not recorded: {self._folder}: {error.strerror or error}"
            self._lines = []
            _log.error("the trace recorder has stopped", folder=str(self._folder), reason=error.strerror or str(error))

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = (self._folder / _CURRENT).open("ab", buffering=0)

    def _write(self, lines: list[bytes]) -> None:
        file = self._file
        assert file is not None
        size = file.seek(0, 2)
        data = b"".join(lines)
        try:
            written = file.write(data)
            if written < len(data):
                file.write(data[written:])  # raises what kept the rest from being written
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)  # no half line stays behind
            raise
        if size + len(data) >= self._max_bytes:
            self._rotate()

    def _rotate(self) -> None:
        assert self._file is not None
        self._file.close()
        current = self._folder / _CURRENT
        packed = self._folder / f"trace-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**9:09d}.jsonl.gz"
        partial = packed.with_suffix(".partial")
        try:
            with current.open("rb") as plain, gzip.open(partial, "wb", compresslevel=3) as archive:
                shutil.copyfileobj(plain, archive)
            partial.rename(packed)
        except OSError:
            partial.unlink(missing_ok=True)  # what it was made of is all there still
            raise
        current.unlink()
        for old in sorted(self._folder.glob(_FULL))[: -self._files]:
            old.unlink()
        self._open()
