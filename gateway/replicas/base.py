"""The replica seam: everything that can generate text for the gateway looks like this.

Our own engine behind a socket and, later, any OpenAI-compatible server are peers behind this protocol; the contract
suite in ``tests/gateway/replicas`` runs on every implementation.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, Protocol

import msgspec

from cache_policy.keys import token_bytes
from engine.wire import CacheEvent, EngineInfo, Load, Output, Sampling, StepTiming, Submit

__all__ = [
    "BACKGROUND_PRIORITY",
    "CountedOutput",
    "EventHealth",
    "GenerationRequest",
    "Replica",
    "ReplicaObserver",
    "ReplicaState",
]

BACKGROUND_PRIORITY: Final = 1000
"""Of requests that no user waits for: behind every service class, of which the last has 100."""


class ReplicaState(enum.StrEnum):
    """Where a replica is in its life. Only ``READY`` replicas are routed to."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


class GenerationRequest(msgspec.Struct, frozen=True):
    """One tokenized prompt on its way to a replica.

    ``token_ids`` is the whole prompt, ``root`` the first parent of its block keys (its cache namespace). ``n`` answers
    to it are wanted. ``priority`` and ``class_limit`` are those of its class, ``max_cached_blocks`` is the quota of
    the tenant ``owner`` (see ``engine.wire.Submit``). ``whole``: nobody wants to know when the first output comes; all
    of them may come at the answer's end.
    """

    token_ids: list[int]
    root: bytes
    sampling: Sampling
    use_cache: bool = True
    n: int = 1
    priority: int = 0
    class_limit: int = 0
    owner: str = ""
    max_cached_blocks: int = 0
    whole: bool = False

    def submit(self, id: int) -> Submit:
        """The message that starts it at one of our engines, as request ``id`` of the connection."""
        return Submit(
            id,
            token_bytes(self.token_ids),
            self.root,
            self.sampling,
            self.use_cache,
            self.n,
            self.priority,
            self.class_limit,
            self.owner,
            self.max_cached_blocks,
        )


class CountedOutput(Output, frozen=True):
    """The last output of a request at a replica that counts at the end, as OpenAI's API does.

    Its ``cached_tokens`` come with this output instead of with the first, or never. ``completion_tokens`` are those of
    all choices, whose outputs need not carry token ids then.
    """

    completion_tokens: int = 0


class EventHealth(msgspec.Struct, frozen=True):
    """How the stream of a remote replica's cache events is.

    ``exact`` tells whether all that the engine holds is known from it, ``problem`` in words why not. Counted are
    ``messages`` taken, ``repeated`` ones, ``gaps`` in the numbers, ``losses`` (gaps that could not be filled),
    ``restarts`` of the engine, ``malformed`` messages, and ``failures`` of this gateway to take one in (its own fault;
    it learns everything again). ``blocks`` is what is known to be held.
    """

    exact: bool
    problem: str | None
    messages: int
    repeated: int
    gaps: int
    losses: int
    restarts: int
    malformed: int
    failures: int
    blocks: int


class ReplicaObserver(Protocol):
    """Hears what a replica reports by itself. Called on the event loop; must not block or raise."""

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """(Re)started with an empty cache: whatever was believed of its blocks is void."""

    def on_down(self, replica: Replica, reason: str) -> None:
        """Lost; its requests in flight have been ended with ``ReplicaLost``, or end so on connections of their own."""

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Blocks were stored or removed."""

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """A step was computed."""


class Replica(Protocol):
    """One engine that serves one model.

    ``id`` is stable over restarts (``engine-0``) and safe in headers and metric labels. ``url`` is that of a remote
    server. ``restarts`` tells whether this gateway starts it again when it ends, so that it is worth waiting for.
    ``info`` and ``load`` are None until the first ``on_ready``, ``load`` also while there is no engine.
    ``down_reason`` says in words why ``state`` is not READY, ``degraded`` what does not work as it should although it
    is. ``reads_tokens``: prompts may go there as token ids. Of a server whose tokenizer was not shown to be this
    gateway's they would be another text. ``forgiven``: what failed before it last became READY says nothing
    about it as it is now.
    """

    id: str
    url: str | None
    restarts: bool
    state: ReplicaState
    info: EngineInfo | None
    load: Load | None
    down_reason: str | None
    degraded: tuple[str, ...]
    reads_tokens: bool
    forgiven: bool

    @property
    def tells_events(self) -> bool:
        """Whether its cache events tell all that becomes of its blocks."""
        ...

    @property
    def cache_blocks(self) -> int:
        """Blocks that its cache has room for; 0 when it does not tell."""
        ...

    @property
    def event_health(self) -> EventHealth | None:
        """How the stream of its cache events is; None where there is no stream of its own for them."""
        ...

    def observe(self, observer: ReplicaObserver) -> None:
        """Report to ``observer`` from now on, after those that came before it."""
        ...

    async def start(self) -> None:
        """Begin to come up; returns without waiting for READY."""

    async def wait_ready(self, timeout: float) -> None:
        """Return when READY. Raises ``ReplicaUnavailable`` after ``timeout`` seconds or when it cannot start."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Stream the outputs of one request; the last one of each choice, and only that, has a ``finish_reason``.

        Closing the generator early aborts the request at the replica.

        Raises:
            ReplicaUnavailable: It is not READY.
            ReplicaLost: It died, or failed the request in a way that another replica would not; the attribute
                ``produced`` says whether any output had come before.
            GenerationError: It could not finish the request.
            HeadstartError: With a status below 500: it refuses the request, which is the caller's to mend.
        """
        ...

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout: float = 30.0
    ) -> dict[str, Any]:
        """A control call (see ``engine.wire.Call``). ``info`` tells the policy that a ``set_policy`` has put in force.

        Raises ``ReplicaError`` with the replica's message, ``ReplicaUnavailable`` when it is not READY.
        """
        ...

    def resync(self) -> None:
        """Have observers told again of all the blocks it holds, by ``AllBlocksCleared`` and what it holds then.

        Returns at once. Nothing comes from a replica that tells no events.
        """
        ...

    async def stop(self, grace: float) -> None:
        """Stop for good: running requests get ``grace`` seconds to end, then are aborted."""
