"""The documents of a log in the order of a batch: all of its requests are known before the first of them is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from xxhash import xxh3_128_digest

from gateway.analysis.log import LogError, LoggedRequest, read_bodies, read_lines
from gateway.canonical.batch_order import BatchRequest, batch_orders
from gateway.canonical.order import UNLIMITED
from gateway.canonical.pipeline import Canonicalizer, CanonicalPrompt
from gateway.config import DEFAULT_TENANT
from gateway.errors import InvalidRequestError
from gateway.schema import HeadstartOptions

__all__ = ["Orders", "arranged", "order_log", "write_arranged"]

Orders = Mapping[int, tuple[int, ...]]
"""By the number of a line: its documents as indexes into the body's, in the order in which they are to be sent."""


def order_log(log: Path, name: str, canonicalizer: Canonicalizer, progress: Callable[[float], None]) -> Orders:
    """Order the documents of all requests of a log together.

    Left out, to be ordered as they would be one by one, are requests that have their documents in a text, some twice
    or in earlier turns, or that limit their order, want another one or a hint. ``name`` and ``progress`` are as in
    ``read_bodies``. Raises ``LogError``.
    """
    lines, requests = [], []
    for line, body in read_bodies(log, name, progress):
        if isinstance(body, LoggedRequest):
            with suppress(InvalidRequestError, RecursionError):  # told of when it is replayed
                request = _batch_request(body, canonicalizer.canonicalize(body, DEFAULT_TENANT))
                if request is not None:
                    lines.append(line)
                    requests.append(request)
    return dict(zip(lines, batch_orders(requests), strict=True))


def _batch_request(body: LoggedRequest, canonical: CanonicalPrompt) -> BatchRequest | None:
    layout = canonical.layout
    documents, target = layout.documents, layout.target
    if target is None or layout.pasted is not None or len(documents) < 2 or len(documents) != len(body.documents or ()):
        return None
    if canonical.order != "cache-aware" or canonical.limits != UNLIMITED or layout.hint:
        return None
    before = [(message.role, message.content) for message in layout.messages[:target]]
    group = xxh3_128_digest(msgspec.json.encode([body.cache_salt, layout.tools, before]))
    return BatchRequest(
        group,
        tuple([document.fingerprint for document in documents]),
        tuple([len(document.block) for document in documents]),  # as good as tokens to tell which saves more
    )


def arranged(body: LoggedRequest, order: tuple[int, ...]) -> LoggedRequest:
    """The body with its documents in this order, which is to stay."""
    documents = body.documents or []
    options = msgspec.structs.replace(body.headstart or HeadstartOptions(), order="preserve")
    return msgspec.structs.replace(body, documents=[documents[index] for index in order], headstart=options)


def write_arranged(log: Path, name: str, orders: Orders, file: Path) -> None:
    """Write the lines of a log to ``file``, ``arranged`` where there is an order for them, all others as they are.

    Raises:
        LogError: the log cannot be read, or ``file`` not be written.
    """
    try:
        with file.open("wb") as lines:
            for line, text in read_lines(log, name, lambda fraction: None):
                order = orders.get(line)
                lines.write(text if order is None else _arranged_line(text, order))
    except OSError as error:
        raise LogError(f"{file}: cannot be written: {error.strerror}.") from None


def _arranged_line(text: bytes, order: tuple[int, ...]) -> bytes:
    """As ``arranged``; everything else is what it is, byte for byte."""
    body = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    documents = msgspec.json.decode(body["documents"], type=list[msgspec.Raw])
    options = msgspec.json.decode(body.get("headstart", b"null"), type=dict[str, msgspec.Raw] | None) or {}
    body["documents"] = msgspec.Raw(msgspec.json.encode([documents[index] for index in order]))
    body["headstart"] = msgspec.Raw(msgspec.json.encode(options | {"order": "preserve"}))
    return msgspec.json.encode(body) + b"\n"
