"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp) as a replica: token ids in, server-sent events out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import msgspec
import structlog

from engine.wire import CacheEvent, EngineInfo, Load, Output
from gateway.config import IndexConfig, ReplicaConfig
from gateway.errors import NotSupportedByReplica, ReplicaLost
from gateway.redaction import redacted
from gateway.replicas.base import EventHealth, GenerationRequest, ReplicaState
from gateway.replicas.http_client import HttpConnection
from gateway.replicas.kv_feed import KvFeed
from gateway.replicas.life import ReplicaLife
from gateway.replicas.openai_completion import AnswerReader, BrokenAnswer, FailedAnswer, completion_body, refusal
from gateway.replicas.openai_flight import Flight, Flights
from gateway.replicas.openai_server import (
    ModelCard,
    OpenAIServer,
    ServedModel,
    ServerGone,
    ServerUnfit,
    words_for,
)
from gateway.replicas.served_models import ServedModels
from gateway.replicas.sse import EventStreamParser, EventTooLong
from gateway.replicas.supervisor import RestartDelay
from gateway.replicas.tokenizer_proof import TokenizerProof

__all__ = ["ForwardedAnswer", "OpenAIReplica"]

_POLL_INTERVAL_S: Final = 1.0
_STEADY_S: Final = 5.0  # after so long a life the next one may begin at once

_BLOCK_SIZE: Final = 16
"""What vLLM uses on GPUs, for servers that do not tell."""

_NOT_THE_CALLERS: Final = frozenset({401, 403, 404, 405, 407, 408})
"""4xx answers that are about how this gateway asks, and so for its operator to mend."""

_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024

_PATIENCE_S: Final = 10.0
"""For so long a server may not be well before the answers that come as one are given up: as a rule they are under way,
and a server that stalls for a moment goes on with them."""

_LAST_EVENT: Final = b"data: [DONE]"
_STREAM_END: Final = _LAST_EVENT + b"\r\n\r\n"

_UNCHECKED: Final = (
    "it offers no /tokenize, so that its tokenizer could not be checked: requests are passed on to it as they are, "
    "where their text belongs, and it gets no token ids"
)
_UNTOLD: Final = (
    "it does not tell how many prompt tokens it had cached "
    "(vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report)"
)

_log = structlog.get_logger("headstart.replica")


class ForwardedAnswer:
    """The beginning of an answer that is passed on as it is, and its body piece by piece."""

    def __init__(self, response: HttpConnection, chunks: AsyncIterator[bytes]) -> None:
        self.status: Final = response.status
        self.headers: Final = response.headers
        self.streamed: Final = response.content_type == "text/event-stream"
        self.chunks: Final = chunks


class OpenAIReplica(ReplicaLife):
    """A ``gateway.replicas.base.Replica`` over HTTP. Owns the connections to the server; belongs to one event loop.

    The server is somebody else's and may come and go. It is looked at every second, and at once when a request finds
    it gone. A request has a connection of its own, so that one which streams goes on while its connection does;
    those that wait for their first token end with ``ReplicaLost`` when the server is found gone, those whose answer
    comes as one when it stays so. Its pool, its queue and the timing of its steps stay its own: ``load`` counts the
    requests that this gateway has there. It is ``forgiven`` what failed before a look found nobody there: it is another
    process since, or its connections were cut. One that looks well, or only unwell, while it fails requests is not.
    """

    def __init__(
        self,
        id: str,
        config: ReplicaConfig,
        proof: TokenizerProof,
        *,
        model: str,
        served_models: ServedModels | None = None,
        max_blocks: int = IndexConfig().max_blocks,
    ) -> None:
        """``model`` is the name clients use, which is chosen where the server has several models.

        ``served_models`` are those of the other replicas, with which it has to agree unless its model is configured.
        ``max_blocks`` bounds what is kept of the blocks that its cache events tell of.
        """
        super().__init__(id, restarts=False, url=config.url)
        self._config: Final = config
        self._proof: Final = proof
        self._model: Final = model
        self._served_models: Final = served_models if config.model is None else None
        self._flights: Final = Flights(self._count_load)
        self._boots = itertools.count(1)
        self._server: OpenAIServer | None = None
        self._served: ServedModel | None = None
        self._event_problems: tuple[str, ...] = ()
        self._look = asyncio.Event()  # somebody has a reason to look at the server now
        self._life: asyncio.Task[None] | None = None
        self._well_at = 0.0
        self._gone = False  # nobody was there when it was looked at, since it was last READY
        self._log = _log.bind(replica=id, url=config.url)
        self._feed: Final = KvFeed.of(id, config, max_blocks, self._hear)

    @property
    def tells_events(self) -> bool:
        """Whether what it holds is known from its cache events."""
        return self._feed is not None and self._feed.follows

    @property
    def cache_blocks(self) -> int:
        """Blocks that its cache has room for; 0 when it does not tell."""
        return 0 if self._served is None else self._served.blocks

    @property
    def event_health(self) -> EventHealth | None:
        """How the stream of its cache events is; None where there is none."""
        return None if self._feed is None else self._feed.health()

    # --- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to look for the server; returns without waiting for READY."""
        assert self._life is None, "a replica is started once"
        self._server = OpenAIServer(self._config)
        if self._feed is not None:
            self._feed.start()
        self._life = asyncio.create_task(self._keep_looking(self._server), name=self.id)

    async def stop(self, grace: float) -> None:
        """Stop for good: running requests get ``grace`` seconds to end, then are aborted."""
        self._set_state(ReplicaState.STOPPED, "stopped")
        if self._served_models is not None:
            self._served_models.leave(self.id)
        if grace > 0:  # also where it was down: an answer that streams goes on while its connection does
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._flights.wait_empty()
        self._flights.lose("the replica was stopped")
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])
            self._life = None
        if self._feed is not None:
            await self._feed.stop()
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _keep_looking(self, server: OpenAIServer) -> None:
        delay = RestartDelay()
        while True:
            ready_at: float | None = None
            try:
                card = await self._find(server)
                served = await server.identify(card, self._proof)
                if self._served_models is not None:
                    self._served_models.join(self.id, self._config.url, card.id)
                self._ready(served)
                ready_at = time.monotonic()
                while self.state is ReplicaState.READY:
                    await self._until_next_look()
                    self._tell_of_events()
                    if await self._find(server) != card:
                        raise ServerUnfit(f"{self._config.url} was given another model")
                reason = self.down_reason or "lost"
            except ServerUnfit as unfit:
                reason = str(unfit)
                self._gone = self._gone or isinstance(unfit, ServerGone)
                self._lose_waiting(redacted(reason))  # their callers get to read it
            self._down(reason)
            pause_s = _POLL_INTERVAL_S
            if ready_at is not None:
                served_s = time.monotonic() - ready_at
                pause_s = delay.after(served_s)
                pause_s = pause_s if served_s < _STEADY_S else 0.0
            await asyncio.sleep(pause_s)

    async def _find(self, server: OpenAIServer) -> ModelCard:
        """What ``server`` serves, when it is well. Raises ``ServerUnfit``."""
        card = await server.look(self._model)
        self._well_at = time.monotonic()
        return card

    def _lose_waiting(self, reason: str) -> None:
        """End the requests of which nothing has come, those that may be under way only when that has gone on."""
        unwell_s = time.monotonic() - self._well_at
        self._flights.lose_waiting(reason, whole=unwell_s >= min(_PATIENCE_S, self._config.idle_timeout_s))

    async def _until_next_look(self) -> None:
        # Not wait_for, which until Python 3.12 may swallow the cancellation that ends this task.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_INTERVAL_S):
                await self._look.wait()
        self._look.clear()

    def _ready(self, served: ServedModel) -> None:
        if self.state is ReplicaState.STOPPED:
            return
        self._served = served
        self.info = EngineInfo(
            model=served.card.id,
            root=served.card.root or "",
            fingerprint=f"{served.card.id} {served.card.root}",
            boot_id=str(next(self._boots)),
            max_model_len=served.max_model_len,
            num_blocks=0,
            block_size=self._config.block_size or served.block_size or _BLOCK_SIZE,
            dtype="",
            device=self._config.url,
            vocab_size=self._proof.vocab_size,
            eos_token_ids=(),
            policy="",
            max_batch_tokens=served.max_model_len,
        )
        self.degraded = () if served.proved else (_UNCHECKED,)
        self.reads_tokens = served.proved
        self.forgiven, self._gone = self._gone, False
        self._count_load()
        self._set_state(ReplicaState.READY, None)
        self._log.info(
            "replica ready", model=served.card.id, context=served.max_model_len, tokenizer_proved=served.proved
        )
        for observer in self._observers:
            observer.on_ready(self, self.info)
        if self._feed is not None:
            self._feed.up(served.blocks)

    def _down(self, reason: str) -> None:
        was_ready = self.state is ReplicaState.READY
        if self._served_models is not None:
            self._served_models.leave(self.id)
        if self.state is ReplicaState.STOPPED:
            return
        repeated = reason == self.down_reason
        self._set_state(ReplicaState.DOWN, reason)
        if not repeated:
            self._log.warning("replica down", reason=reason)
        if self._feed is not None:
            self._feed.down()
        if was_ready:
            for observer in self._observers:
                observer.on_down(self, reason)

    # --- work ------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Stream the outputs of one request; closing the generator closes its connection at once.

        Raises: as ``Replica.generate``; ``ReplicaRefusal`` with what the server says where it refuses the request.
        """
        if self._server is None or self._served is None or self.info is None or self.state is not ReplicaState.READY:
            raise self._not_ready()
        if not self.reads_tokens:
            raise NotSupportedByReplica(f"{self.id} gets no token ids: its tokenizer could not be checked.")
        whole = request.whole and request.sampling.logprobs is None  # of which there may be too many for one piece
        body = completion_body(self._served.card.id, request, stream=not whole)
        flight, boot_id = Flight(self._config.idle_timeout_s, whole=whole), self.info.boot_id
        answer = AnswerReader(request)
        self._flights.add(flight)
        try:
            if await self._open(flight, self._server, body):
                events = EventStreamParser()
                while not answer.done and (data := await flight.read()):
                    outputs, failure = answer.read_all(events.feed(data))
                    for output in outputs:
                        flight.produced = True
                        yield output
                    if failure is not None:
                        raise failure
                last = answer.end()
            else:
                others, last = answer.whole(await flight.read_all(_MAX_ANSWER_BYTES))
                for output in others:
                    yield output
            flight.finish()
            if last.cached_tokens is None:
                self._tell_of_missing_counts()
            elif self._feed is not None and request.use_cache:
                self._feed.found(request.root, request.token_ids, last.cached_tokens)
            yield last
        except OSError as error:
            raise self._lost(flight, boot_id, flight.loss or words_for(error)) from None
        except (BrokenAnswer, EventTooLong, FailedAnswer) as error:
            raise self._failed(flight, str(error)) from None
        finally:
            flight.close()
            self._flights.remove(flight)

    @contextlib.asynccontextmanager
    async def forward(
        self, route: str, body: bytes, headers: dict[str, str], *, whole: bool
    ) -> AsyncIterator[ForwardedAnswer]:
        """Pass a request on as it is, for the length of the block; leaving it early closes its connection at once.

        ``whole``: its answer is not streamed.

        Raises:
            ReplicaUnavailable: It is not READY.
            ReplicaLost: It was lost, or answers that it cannot; before the block, or while its answer is read.
        """
        if self._server is None or self.info is None or self.state is not ReplicaState.READY:
            raise self._not_ready()
        flight, boot_id = Flight(self._config.idle_timeout_s, whole=whole), self.info.boot_id
        self._flights.add(flight)
        try:
            response = await flight.open(self._server.client, self._server.head(route, headers), body)
            if response.status >= 500 or response.status in _NOT_THE_CALLERS or 300 <= response.status < 400:
                raise self._failed(flight, f"it answered {response.status}")
            yield ForwardedAnswer(response, self._relayed(flight, response))
        except OSError as error:
            raise self._lost(flight, boot_id, flight.loss or words_for(error)) from None
        except BrokenAnswer as error:
            raise self._failed(flight, str(error)) from None
        finally:
            flight.close()
            self._flights.remove(flight)

    async def _relayed(self, flight: Flight, response: HttpConnection) -> AsyncIterator[bytes]:
        """The body as it comes. Raises as ``forward``, also for a stream without its end."""
        tail = b""
        while data := await flight.read():
            flight.produced = True
            tail = (tail + data)[-len(_STREAM_END) :]
            yield data
        if response.status == 200 and response.content_type == "text/event-stream" and tail.strip() != _LAST_EVENT:
            raise BrokenAnswer("its answer ended before its end")

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout: float = 30.0
    ) -> dict[str, Any]:
        """Raises ``NotSupportedByReplica``: OpenAI's API has no control calls."""
        if self.state is not ReplicaState.READY:
            raise self._not_ready()
        raise NotSupportedByReplica(f"{self.id} is a remote server, which knows no {method!r}: ask it there.")

    def resync(self) -> None:
        """Have observers told again of all the blocks it holds, where it tells of them at all."""
        if self._feed is not None:
            self._feed.resync()

    async def _open(self, flight: Flight, server: OpenAIServer, body: bytes) -> bool:
        """Send the request and wait for the beginning of an answer; whether it is a stream.

        Raises: as ``generate``.
        """
        response = await flight.open(server.client, server.completion_head(stream=not flight.whole), body)
        status, kind = response.status, response.content_type
        if status == 200 and kind == "text/event-stream":
            return True
        if status == 200 and flight.whole and kind == "application/json":
            return False
        words = await flight.read_error()
        if 400 <= status < 500 and status not in _NOT_THE_CALLERS:
            raise refusal(status, words, response.header(b"retry-after"))
        # What it says may quote the request, and this goes into the log.
        said = f"it answered {status}" if status != 200 else f"it answered with {kind!r}, not a completion"
        raise self._failed(flight, said)

    def _failed(self, flight: Flight, reason: str) -> ReplicaLost:
        """What ends a request that the server itself gives up, or answers with what is no answer.

        It may be well for others: a look will tell, and if it goes on its circuit breaker opens.
        """
        self._look.set()
        return ReplicaLost(f"{self.id} cannot answer: {reason}.", produced=flight.produced)

    def _lost(self, flight: Flight, boot_id: str, reason: str) -> ReplicaLost:
        """What ends a request whose connection has failed. The server is not asked again before it was looked at."""
        came_back = self.info is None or self.info.boot_id != boot_id
        if self.state is ReplicaState.READY and not came_back:
            self._down(f"{self._config.url}: {reason}")
            self._look.set()
        return ReplicaLost(f"{self.id} was lost: {reason}.", produced=flight.produced)

    def _hear(self, events: tuple[CacheEvent, ...]) -> None:
        """Pass on what became of its blocks."""
        assert self._feed is not None, "a feed tells it"
        size = self._feed.block_size
        if self.info is not None and size and size != self.info.block_size:
            self._log.info("blocks have another size than was thought", tokens=size, thought=self.info.block_size)
            self.info = msgspec.structs.replace(self.info, block_size=size)
        for observer in self._observers:
            observer.on_events(self, events)

    def _tell_of_events(self) -> None:
        if self._feed is not None:
            others = [words for words in self.degraded if words not in self._event_problems]
            self._event_problems = self._feed.problems()
            self.degraded = (*others, *self._event_problems)

    def _tell_of_missing_counts(self) -> None:
        if _UNTOLD not in self.degraded:
            self.degraded += (_UNTOLD,)

    def _count_load(self) -> None:
        self.load = Load(len(self._flights), 0, 0, 0, 0, 0, 0, 0, 0, 0)
