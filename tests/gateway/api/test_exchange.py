"""One request at the level of ASGI: what no well-behaved server would let through to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api import exchange
from gateway.api.exchange import Exchange
from gateway.errors import BodyTimeoutError


def test_a_body_that_does_not_come_is_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_BODY_TIMEOUT_S", 0.01)

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope: Any = {
        "headers": [(b"content-length", b"9")],
        "extensions": {exchange.CONNECTION: SimpleNamespace(has_body=False)},
    }

    async def scenario() -> None:
        with pytest.raises(BodyTimeoutError) as caught:
            await Exchange(scope, receive, None).body(100)
        assert caught.value.status == 408

    asyncio.run(scenario())
