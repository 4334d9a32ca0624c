"""Requests that a replica is working on, and how what it reports reaches whoever asked.

An answer waits in its own mailbox, so that a client that reads slowly holds up neither the engine nor anyone else.
A mailbox is bounded by its answer (at most the model's context), and what has piled up leaves it in one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.wire import Output
from gateway.errors import ContextLengthError, GenerationError, HeadstartError, InvalidRequestError, ReplicaLost
from gateway.replicas.outputs import merged

__all__ = ["InFlight", "Mailbox"]


class Mailbox:
    """Outputs of one request on their way to the one task that reads it.

    ``id`` is unique among the requests of one replica object. ``ended`` is True once the last output of the last of
    its choices has been put in.
    """

    __slots__ = ("_choices", "_lost", "_outputs", "_produced", "_waiter", "ended", "id")

    def __init__(self, id: int, choices: int) -> None:
        self.id = id
        self.ended = False
        self._choices = choices  # that have not ended
        self._outputs: list[Output] = []
        self._produced = False
        self._lost: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        """Add what a step produced."""
        self._outputs.append(output)
        self._choices -= output.finish_reason is not None
        self.ended = not self._choices or output.error is not None  # an error ends all of them
        self._wake()

    def lose(self, reason: str) -> None:
        """No more will come: the reader gets what is here, then ``ReplicaLost``."""
        self._lost = reason
        self.ended = True
        self._wake()

    async def take(self) -> Output:
        """What has come of one choice since the last call, as one output; waits for the first.

        Raises:
            ReplicaLost: The replica died before the request's end.
            InvalidRequestError: It refuses the request.
            GenerationError: It could not finish the request.
        """
        while not self._outputs:
            if self._lost is not None:
                raise ReplicaLost(self._lost, produced=self._produced)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        index = self._outputs[0].index
        outputs = [output for output in self._outputs if output.index == index]
        self._outputs = [output for output in self._outputs if output.index != index]
        if outputs[-1].error is not None:
            raise _request_error(outputs[-1].error)
        output = merged(outputs)
        self._produced = self._produced or bool(output.token_ids)
        return output

    @property
    def emptied(self) -> bool:
        """Whether all has been taken that will ever come. Never after a loss: ``take`` raises then."""
        return self.ended and self._lost is None and not self._outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class InFlight:
    """The mailboxes of one replica's running requests. Owned by the replica; belongs to the event loop."""

    def __init__(self) -> None:
        self._mailboxes: dict[int, Mailbox] = {}
        self._last_id = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, choices: int) -> Mailbox:
        """A mailbox for a new request. Its id is never used again."""
        self._last_id += 1
        mailbox = self._mailboxes[self._last_id] = Mailbox(self._last_id, choices)
        self._idle.clear()
        return mailbox

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Put each output into its mailbox. Those of requests that were closed meanwhile are dropped."""
        for output in outputs:
            mailbox = self._mailboxes.get(output.id)
            if mailbox is not None:
                mailbox.put(output)
                if mailbox.ended:
                    self._remove(mailbox)

    def close(self, mailbox: Mailbox) -> bool:
        """The reader has gone. True when the request was still running and the replica has to be told."""
        if mailbox.id not in self._mailboxes:
            return False
        self._remove(mailbox)
        return True

    def lose(self, reason: str) -> None:
        """End every running request with ``ReplicaLost``."""
        for mailbox in list(self._mailboxes.values()):
            mailbox.lose(reason)
            self._remove(mailbox)

    async def wait_idle(self) -> None:
        """Return when nothing is running."""
        await self._idle.wait()

    def _remove(self, mailbox: Mailbox) -> None:
        del self._mailboxes[mailbox.id]
        if not self._mailboxes:
            self._idle.set()


def _request_error(error: tuple[str, str]) -> HeadstartError:
    """An engine's (code, message) as the error a client sees."""
    code, message = error
    sentence = f"{message[:1].upper()}{message[1:]}."
    if code == ContextLengthError.code:
        return ContextLengthError(sentence)
    if code in ("invalid_token", "invalid_request"):
        return InvalidRequestError(sentence, code=code)
    return GenerationError(sentence, code=code)
