"""A request that is passed on, at the level of HTTP: which headers travel, and the answer byte for byte."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import msgspec

from gateway.api.answers import AnswerFormat
from gateway.api.decoding import decode_body
from gateway.api.exchange import Exchange
from gateway.errors import HeadstartError, OverloadedError
from gateway.foreign import ForeignRequest, Owned
from gateway.forwarding import Forwarding
from gateway.plan import Caller
from gateway.service import Gateway

__all__ = ["relay"]

_owned_decoder: Final = msgspec.json.Decoder(Owned)
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]")

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""RFC 9110, section 7.6.1: they are about one connection, and so are those that a ``Connection`` header names."""

_NOT_PASSED_ON: Final = _HOP_BY_HOP | {
    b"accept-encoding",  # the answer is to come as it is
    b"authorization",  # the caller's key is for this gateway
    b"content-length",
    b"cookie",
    b"expect",
    b"host",
    b"x-request-id",  # as this gateway understood it
}
_NOT_PASSED_BACK: Final = _HOP_BY_HOP | {b"date", b"server", b"set-cookie", b"x-request-id"}


async def relay(
    gateway: Gateway, exchange: Exchange, request: ForeignRequest, data: bytes, caller: Caller, arrived: float
) -> None:
    """Pass ``request``, whose body is ``data``, on and its answer back. Errors before its first byte are raised."""
    owned = decode_body(_owned_decoder, data)
    named = b",".join(value for name, value in exchange.headers if name == b"connection")
    left_out = _NOT_PASSED_ON.union(name.strip().lower() for name in named.split(b","))
    headers = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers if name not in left_out
    }
    headers["x-request-id"] = exchange.id
    headers.setdefault("content-type", "application/json")
    try:
        async with gateway.forwarder.forward(request, owned, headers, caller, arrived) as forwarding:
            await _answer(exchange, forwarding)
    except HeadstartError as error:
        if not exchange.started:
            raise
        await exchange.break_off(AnswerFormat.error_event(error))
    except asyncio.CancelledError:
        if exchange.started:
            await exchange.break_off(
                AnswerFormat.error_event(OverloadedError("The server was stopped before the answer was complete."))
            )
        raise


async def _answer(exchange: Exchange, forwarding: Forwarding) -> None:
    chunks = forwarding.chunks()
    if forwarding.streamed:
        first = await anext(chunks, b"")
    else:  # what breaks off in the middle of it is told by its status then
        first = b"".join([data async for data in chunks])
    headers = [(name.lower(), value) for name, value in forwarding.headers if name.lower() not in _NOT_PASSED_BACK]
    headers += [
        (b"x-headstart-replica", forwarding.plan.replica_id.encode()),
        (b"x-headstart-order", forwarding.plan.order.encode()),
        (b"x-headstart-note", _UNPRINTABLE.sub("?", forwarding.plan.note or "").encode()),
    ]
    exchange.start_relay(forwarding.status, headers)
    if first:
        await exchange.send_events(first)
    async for data in chunks:
        if not exchange.send_at_once(data):
            await exchange.send_events(data)
    await exchange.end_events(b"")
