"""A replica without a model or a process: the test double of the replica seam.

It is our engine's own core (scheduler, block manager, prefix cache) over a scripted runner, stepped on the event loop.
So counts of cached tokens, evictions, finish reasons and refusals are the real ones; only the text means nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from engine.core import EngineCore
from engine.detokenize import IncrementalDetokenizer
from engine.errors import CallError
from engine.scripted import ScriptedRunner
from engine.wire import EngineInfo, Output, StepTiming
from gateway.errors import ReplicaError
from gateway.replicas.base import GenerationRequest, ReplicaState
from gateway.replicas.own_engine import OwnEngineReplica

__all__ = ["ScriptedReplica", "scripted_info"]

_PROFILE: Final = tuple(
    StepTiming(tokens, tokens * tokens // 2, 0, 0, 0.01 + tokens * 0.001) for tokens in (64, 256, 512)
)


def scripted_info(
    tokenizer: Tokenizer,
    *,
    model: str = "scripted",
    root: str = "",
    num_blocks: int = 512,
    block_size: int = 16,
    max_model_len: int = 2048,
    max_batch_tokens: int = 512,
    eos_token_ids: Sequence[int] = (),
) -> EngineInfo:
    """What a ``ScriptedReplica`` says it serves. ``profile`` claims 10 ms a step and 1 ms a token."""
    return EngineInfo(
        model=model,
        root=root,
        fingerprint="scripted",
        boot_id="0",
        max_model_len=min(max_model_len, num_blocks * block_size),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype="none",
        device="none",
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=tuple(eos_token_ids),
        policy="lru",
        max_batch_tokens=max_batch_tokens,
        profile=_PROFILE,
    )


class ScriptedReplica(OwnEngineReplica):
    """A ``gateway.replicas.base.Replica`` in this process. Owns its engine core; belongs to one event loop.

    The next token depends on all tokens before it, as read back through the cache, so a wrong block gives a wrong
    answer. ``hold`` and ``let_go`` stop and resume its steps, ``lose`` and ``recover`` play a crash and a restart.
    """

    def __init__(self, id: str, tokenizer: Tokenizer, info: EngineInfo | None = None, *, max_running: int = 32) -> None:
        super().__init__(id, restarts=True)
        self.submitted: list[GenerationRequest] = []
        """Every request that was ever submitted, oldest first."""
        self._tokenizer = tokenizer
        self._announced = info or scripted_info(tokenizer)
        self._max_running = max_running
        self._boots = itertools.count(1)
        self._released = asyncio.Event()
        self._released.set()
        self._work = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._core: EngineCore

    # --- what a test does to it --------------------------------------------------------------------------

    def hold(self) -> None:
        """Compute nothing until ``let_go``."""
        self._released.clear()

    def let_go(self) -> None:
        """Go on computing."""
        self._released.set()

    def lose(self, reason: str = "killed by a test") -> None:
        """Die with everything in flight."""
        self._stop_steps()
        self._set_state(ReplicaState.DOWN, reason)
        self._in_flight.lose(f"{self.id} was lost: {reason}")
        for observer in self._observers:
            observer.on_down(self, reason)

    def recover(self) -> None:
        """Come up again with an empty cache."""
        info = msgspec.structs.replace(self._announced, boot_id=str(next(self._boots)))
        runner = ScriptedRunner(info.num_blocks, info.block_size, vocab_size=info.vocab_size, eos=info.eos_token_ids)
        self._core = EngineCore(runner, info, detokenizer=self._detokenizer, max_running=self._max_running)
        self.info, self.load = info, self._core.load()
        self._set_state(ReplicaState.READY, None)
        self._steps = asyncio.create_task(self._run(), name=f"{self.id}-steps")
        for observer in self._observers:
            observer.on_ready(self, info)

    # --- Replica -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Be READY at once."""
        self.recover()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Stream the outputs of one request. Raises as ``Replica.generate``."""
        self._must_be_ready()
        core, mailbox = self._core, self._in_flight.open(request.n)
        self.submitted.append(request)
        try:
            core.submit(request.submit(mailbox.id))
            self._work.set()
            while not mailbox.emptied:
                yield await mailbox.take()
        finally:
            if self._in_flight.close(mailbox):
                core.abort((mailbox.id,))
                self._work.set()

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout: float = 30.0
    ) -> dict[str, Any]:
        """A control call. Raises as ``Replica.call``."""
        self._must_be_ready()
        try:
            result = self._core.call(method, dict(params or {}))
        except CallError as error:
            raise ReplicaError(f"{self.id}: {error}") from error
        self.info = self._core.info
        self._work.set()
        return result

    def resync(self) -> None:
        """Have observers told again of all the blocks it holds."""
        if self.state is ReplicaState.READY:
            self._core.call("retell", {})
            self._work.set()

    async def stop(self, grace: float) -> None:
        """Stop for good; running requests get ``grace`` seconds to end."""
        await self._stop_answering(grace)
        self._stop_steps()

    # --- inside ------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        core = self._core
        while True:
            await self._work.wait()
            await self._released.wait()
            report = core.step()
            if report is not None:
                self._take(report)
            if not core.has_work():
                self._work.clear()
            await asyncio.sleep(0)

    def _must_be_ready(self) -> None:
        if self.state is not ReplicaState.READY:
            raise self._not_ready()

    def _stop_steps(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
            self._steps = None

    def _detokenizer(self, stop: tuple[str, ...]) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._tokenizer, stop)
