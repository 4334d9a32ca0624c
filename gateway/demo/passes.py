"""One pass of the demo: a cold cache, all requests, and what the gateway counted meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.demo.client import Client, Outcome
from gateway.demo.report import PassFigures, pass_figures
from gateway.errors import HeadstartError

__all__ = ["StatisticsMissing", "run_pass"]

_SETTLE_S: Final = 10.0


class StatisticsMissing(HeadstartError):
    """The gateway's statistics do not show the requests that were sent."""


async def run_pass(
    client: Client, bodies: Sequence[dict[str, Any]], *, concurrency: int, on_outcome: Callable[[Outcome], None]
) -> tuple[PassFigures, list[Outcome]]:
    """Empty the cache, send ``bodies``, and return the figures with the outcomes in the bodies' order.

    Raises:
        StatisticsMissing: The gateway did not count all answered requests.
        aiohttp.ClientError: The gateway cannot be talked to.
    """
    await client.reset_cache()
    before = await _totals(client)
    outcomes = await client.complete_all(bodies, concurrency, on_outcome)
    answered = sum(outcome.failure is None for outcome in outcomes)  # a refused request may not have been counted
    after = await _totals_after(client, before["requests"] + answered)
    figures = pass_figures(
        outcomes,
        prefill_s=after["prefill_s"] - before["prefill_s"],
        saved_prefill_s=after["saved_prefill_s"] - before["saved_prefill_s"],
    )
    return figures, outcomes


async def _totals(client: Client) -> dict[str, Any]:
    totals: dict[str, Any] = (await client.get_json("/admin/stats"))["totals"]
    return totals


async def _totals_after(client: Client, requests: int) -> dict[str, Any]:
    """The totals once they hold ``requests`` requests: a snapshot may be some seconds old."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        totals = await _totals(client)
        if totals["requests"] >= requests:
            return totals
        if time.monotonic() > deadline:
            raise StatisticsMissing(f"the statistics show {totals['requests']} requests instead of {requests}")
        await asyncio.sleep(0.2)
