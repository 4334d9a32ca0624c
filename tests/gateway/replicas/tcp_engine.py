"""An engine of our own on a TCP port of this process, which a test can stop and start again at the same place."""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.core import EngineCore
from engine.detokenize import IncrementalDetokenizer
from engine.scripted import ScriptedRunner
from engine.server import EngineServer
from engine.tcp import bind_tcp_socket
from gateway.replicas.scripted import scripted_info

SECRET = "correct-horse-battery"


class TcpEngine:
    """``async with`` it; ``port`` stays the same over ``stop`` and ``listen``. ``info`` changes what it tells."""

    def __init__(self, tokenizer: Tokenizer, *, secret: str = SECRET, **info: Any) -> None:
        self.port = 0
        self.info = msgspec.structs.replace(
            scripted_info(tokenizer, num_blocks=64, max_model_len=1024, max_batch_tokens=128), **info
        )
        self._tokenizer = tokenizer
        self._secret = secret.encode()
        self._boots = itertools.count(1)
        self._server: EngineServer
        self._serving: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        listener = bind_tcp_socket("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        listener.listen()  # whoever connects from here on is served
        info = msgspec.structs.replace(self.info, boot_id=str(next(self._boots)))
        core = EngineCore(
            ScriptedRunner(info.num_blocks, info.block_size, vocab_size=info.vocab_size, eos=info.eos_token_ids),
            info,
            detokenizer=lambda stop: IncrementalDetokenizer(self._tokenizer, stop),
        )
        self._server = EngineServer(core, listener, secret=self._secret)
        self._serving = asyncio.create_task(self._server.serve())

    async def stop(self) -> None:
        self._server.stop()
        await self._serving

    async def __aenter__(self) -> TcpEngine:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._serving.done():
            await self.stop()
