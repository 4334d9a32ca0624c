"""Learning from live requests without holding them up: what takes long is done in a thread.

To align a text of no known form takes its length, up to some tens of milliseconds for the longest, and whoever wants to
can send such texts only. In a thread that work takes turns with the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.learning.observation import Source
from gateway.logs import where_from

__all__ = ["MAX_WAITING", "BackgroundLearning"]

MAX_WAITING: Final = 64
"""Texts that wait for the thread, each of 32,768 characters at most; further ones are passed over and counted."""

_log = structlog.get_logger("headstart.templates")


class BackgroundLearning:
    """Shows texts to ``learner`` one by one, in order, from the event loop or, while one takes long, from a thread.

    Owns that thread and what waits for it; belongs to the event loop.
    """

    def __init__(self, learner: TemplateLearner) -> None:
        self._learner: Final = learner
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="learning")
        self._waiting: list[tuple[Source, str]] = []
        self._running: asyncio.Future[None] | None = None
        self._closed = False
        self._failed = False

    @property
    def idle(self) -> bool:
        """Whether nothing is left to the thread."""
        return self._running is None

    def observe(self, source: Source, text: str) -> None:
        """Learn from the system text of one request, now or soon."""
        if self._running is None and not self._closed:
            self._learner.observe(source, text, later=self._later)
        else:
            self._later(source, text)

    def close(self) -> None:
        """Learn no more; what runs comes to its end. Safe to repeat."""
        self._closed = True
        self._waiting.clear()
        if self._running is not None:
            self._running.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _later(self, source: Source, text: str) -> None:
        if self._closed or len(self._waiting) >= MAX_WAITING:
            self._learner.passed_over["busy"] += 1
            return
        self._waiting.append((source, text))
        if self._running is None:
            self._next()

    def _next(self, _: object = None) -> None:
        """Give the thread what waits; it has done what it had."""
        self._running = None
        if self._waiting and not self._closed:
            texts, self._waiting = self._waiting, []
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, self._learn, texts)
            self._running.add_done_callback(self._next)

    def _learn(self, texts: Sequence[tuple[Source, str]]) -> None:
        for source, text in texts:
            try:
                self._learner.observe(source, text)
            except Exception as error:  # nobody waits for it, and the other texts are to be learned
                if not self._failed:
                    self._failed = True
                    _log.error("nothing could be learned from a text", error=where_from(error))
