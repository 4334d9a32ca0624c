"""Large bodies are read and planned in a thread, so that they do not hold up all other requests.

Some megabytes take tenths of a second to some seconds to parse, canonicalize and tokenize, during which an event loop
does nothing else. In a thread they take turns with it, and most of the time is the tokenizer's, which needs no turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Final, TypeVar

import msgspec

from gateway.plan import Caller, Plan
from gateway.request_path import Fleet, RequestPath
from gateway.routing.candidate import Candidate
from gateway.schema import ChatRequest, CompletionRequest

__all__ = ["LARGE_BODY_BYTES", "LargeBodies"]

LARGE_BODY_BYTES: Final = 256 * 1024
"""Bodies with more bytes go to the thread. Smaller ones take less time than the way there and back would be worth."""

_Result = TypeVar("_Result")


class _Present:
    """The replicas that might take a request when its turn in the thread had come: a ``Fleet`` that stands still."""

    def __init__(self) -> None:
        self.now: Sequence[Candidate] = ()

    def candidates(self, avoid: Set[str] = frozenset()) -> list[Candidate]:
        """Those, whatever is to be avoided: the live fleet has left it out."""
        return list(self.now)


class LargeBodies:
    """Owns one thread, so that large requests wait for each other, and the request path that is walked in it.

    ``make_path`` composes that path over the fleet it is given; nothing that changes may be shared with other threads.
    ``fleet`` is the live one. ``waiting`` counts the calls in hand; all of this is for the event loop to ask.
    """

    def __init__(self, make_path: Callable[[Fleet], RequestPath], fleet: Fleet) -> None:
        self._present: Final = _Present()
        self._path: Final = make_path(self._present)
        self._fleet: Final = fleet
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")
        self.waiting = 0

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """The result of ``work``, done in the thread. Raises whatever it raises."""
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, copy_context().run, work)
        finally:
            self.waiting -= 1

    async def plan_chat(self, body: ChatRequest, caller: Caller, avoid: Set[str] = frozenset()) -> Plan:
        """``RequestPath.plan_chat``; the candidates are those of now."""
        return await self._planned(lambda: _settled(self._path.plan_chat(body, caller)), avoid)

    async def plan_completion(self, body: CompletionRequest, caller: Caller, avoid: Set[str] = frozenset()) -> Plan:
        """``RequestPath.plan_completion`` likewise."""
        return await self._planned(lambda: self._path.plan_completion(body, caller), avoid)

    def close(self) -> None:
        """Take no more; what runs comes to its end. Safe to repeat."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _planned(self, plan: Callable[[], Plan], avoid: Set[str]) -> Plan:
        candidates = self._fleet.candidates(avoid)

        def work() -> Plan:
            self._present.now = candidates
            return plan()

        return await self.run(work)


def _settled(plan: Plan) -> Plan:
    """``plan`` with its anatomy worked out, which takes the memories of this thread's tokenizer."""
    if plan.anatomy is None:
        return plan
    anatomy = plan.anatomy()
    return msgspec.structs.replace(plan, anatomy=lambda: anatomy)
