"""The part with servers: starts those that are there, measures them in turns, and ends them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import torch
from tokenizers import Tokenizer

from benchmarks.side_by_side import peers
from benchmarks.side_by_side.client import CompletionClient
from benchmarks.side_by_side.peers import KV_TOKENS, Peer
from benchmarks.side_by_side.rounds import (
    ClosedLoop,
    FirstTokens,
    LoadSize,
    check_tokens,
    first_tokens,
    serve_closed_loop,
    warm_up,
)
from benchmarks.side_by_side.servers import free_port, running
from benchmarks.side_by_side.workload import Workload
from engine.models.loading import kv_bytes_per_block, read_model_info
from engine.native.build import build_kernels, compiler
from gateway.cli.terminal import NOTES

__all__ = ["Contest", "ContestRound", "Contestants"]

_START_S: Final = 900.0  # vLLM compiles for minutes at its first start
_WARM_REQUESTS: Final = 8
_TRIAL_REQUESTS: Final = 16
# Workloads beside those of the closed loops, which have the seed of the run and those after it.
_WARM_UP: Final = -1
_TRIAL: Final = -2
_FIRST_TOKENS: Final = 10_000


class Contestants(msgspec.Struct, frozen=True):
    """Who takes part, and in which Python the others are installed.

    ``names`` are of ``headstart``, ``vllm`` and ``transformers``. Of ``vllm_dtypes`` the one that serves faster is
    taken. ``vllm_preload`` None looks for the libraries.
    """

    names: tuple[str, ...]
    model: Path
    dtype: str
    vllm: Path | None
    vllm_dtypes: tuple[str, ...]
    vllm_preload: str | None
    transformers: Path
    max_batch_tokens: int = 512


class ContestRound(msgspec.Struct, frozen=True):
    """What one round has measured, by server; what was not asked for is empty."""

    first: dict[str, FirstTokens]
    closed: dict[str, ClosedLoop]


class Contest:
    """Owns the servers that run and a client of each. ``say`` hears what is done."""

    def __init__(self, contestants: Contestants, seed: int, say: Callable[[str], None]) -> None:
        self._contestants = contestants
        self._seed = seed
        self._say = say
        self._tokenizer = Tokenizer.from_file(str(contestants.model / "tokenizer.json"))
        self._clients: dict[str, tuple[str, CompletionClient]] = {}  # with the name that is shown
        self.trial: dict[str, float] = {}
        """Requests per second of each dtype of vLLM that was tried."""

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Start the servers that are installed, one after the other, and warm them up; they end with the block.

        Raises:
            ServerError: one of them does not come up or does not answer as it should.
        """
        async with AsyncExitStack() as stack:
            for name in self._contestants.names:
                peer = await self._peer(name)
                if peer is not None:
                    self._clients[name] = peer.name, await stack.enter_async_context(self._serving(peer))
            yield

    async def round(self, index: int, size: LoadSize) -> ContestRound:
        """Measure every server; each round begins with another one.

        Raises:
            ServerError: a request failed.
        """
        names = [*self._clients]
        order = names[index % len(names) :] + names[: index % len(names)]
        first, closed = {}, {}
        for name in order if size.first_tokens else ():
            shown, client = self._clients[name]
            self._say(f"first token, {shown}")
            workload = self._workload(_FIRST_TOKENS + index)
            first[name] = await first_tokens(client, shown, workload, size.first_tokens)
        for name in order if size.requests else ():
            shown, client = self._clients[name]
            self._say(f"closed loop, {shown}")
            closed[name] = await serve_closed_loop(client, shown, self._workload(index), size.requests)
        return ContestRound(first, closed)

    @asynccontextmanager
    async def _serving(self, peer: Peer) -> AsyncIterator[CompletionClient]:
        """Run one server, make sure that it reads prompts as all others do, and warm it up."""
        self._say(f"starting {peer.name}")
        async with (
            running(peer.command, peer.environment, f"{peer.base_url}{peer.ready}", _START_S),
            CompletionClient(peer.base_url, peer.fields) as client,
        ):
            self._say(f"warming up {peer.name}")
            workload = self._workload(_WARM_UP)
            text = workload.prompt(0).text
            await check_tokens(client, peer.name, text, self._tokenizer.encode(text).ids)
            await warm_up(client, peer.name, workload, _WARM_REQUESTS)
            yield client

    async def _peer(self, name: str) -> Peer | None:
        """How a server is started; None, with a word about it, when it is not installed."""
        given = self._contestants
        match name:
            case "headstart":
                if compiler() is not None:
                    self._say("building the kernels")
                    build_kernels()  # a server's first start would not wait for them
                return peers.headstart(given.model, given.dtype, free_port())
            case "transformers" if peers.has_transformers_server(given.transformers):
                return peers.transformers(
                    given.transformers,
                    given.model,
                    given.dtype,
                    free_port(),
                    max_batch_tokens=given.max_batch_tokens,
                )
            case "vllm" if given.vllm is not None and peers.has_vllm(given.vllm):
                return self._vllm(given.vllm, await self._faster_dtype(given.vllm))
        NOTES.print(f"{name} is left out: its Python has no such server. benchmarks/README.md says how to install it.")
        return None

    def _vllm(self, python: Path, dtype: str) -> Peer:
        given = self._contestants
        needed = kv_bytes_per_block(read_model_info(given.model).layers, getattr(torch, dtype), 1) * KV_TOKENS
        preload = peers.vllm_preload(python) if given.vllm_preload is None else given.vllm_preload
        kv_gib = -(-needed // 2**30) + 1
        return peers.vllm(python, given.model, dtype, free_port(), kv_gib=kv_gib, preload=preload)

    async def _faster_dtype(self, python: Path) -> str:
        """The dtype in which vLLM serves the workload faster on this machine."""
        dtypes = self._contestants.vllm_dtypes
        if len(dtypes) == 1:
            return dtypes[0]
        for dtype in dtypes:
            peer = self._vllm(python, dtype)
            async with self._serving(peer) as client:
                self._say(f"trying {peer.name}")
                loop = await serve_closed_loop(client, peer.name, self._workload(_TRIAL), _TRIAL_REQUESTS)
                self.trial[dtype] = loop.requests_per_s
        return max(self.trial, key=self.trial.__getitem__)

    def _workload(self, offset: int) -> Workload:
        return Workload(self._seed + offset, lambda text: len(self._tokenizer.encode(text).ids))
