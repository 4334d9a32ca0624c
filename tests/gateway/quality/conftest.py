"""A gateway over replicas whose answers are made up: by what stands first, or by nothing but what is there."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from engine.wire import EngineInfo, Load, Output, Sampling, TokenLogprobs
from gateway.config import CanonicalConfig, Config, QualityConfig, RedisConfig
from gateway.errors import InvalidRequestError, ReplicaLost
from gateway.generation import Generation
from gateway.plan import Caller
from gateway.replicas.base import GenerationRequest, ReplicaObserver, ReplicaState
from gateway.schema import ChatRequest
from gateway.service import Gateway

from ..conftest import until

MODEL = "m"
CALLER = Caller("acme")
WORDS = ["river", "stone", "garden", "winter", "letter", "copper", "signal", "harbor", "meadow", "lantern"]

Model = Callable[[list[str], random.Random], str]
"""From the ids of the documents in the order of the prompt to an answer."""


def order_sensitive(ids: list[str], rng: random.Random) -> str:
    """Believes whatever stands first."""
    return " ".join(f"{word}{ids[0]}" for word in WORDS)


def order_insensitive(ids: list[str], rng: random.Random) -> str:
    """Reads everything."""
    return " ".join(f"{word}{'-'.join(sorted(ids))}" for word in WORDS)


def noisy(ids: list[str], rng: random.Random) -> str:
    """Reads everything, and words half of its answer by chance."""
    known = order_insensitive(ids, rng).split()[:5]
    return " ".join([*known, *(f"{word}{rng.randrange(3)}" for word in WORDS[5:])])


class StubReplica:
    """A ``gateway.replicas.base.Replica`` that counts what is asked of it and what runs at once."""

    def __init__(self, id: str, tokenizer: Tokenizer, model: Model, rng: random.Random, dtype: str) -> None:
        self.id = id
        self.state = ReplicaState.STARTING
        self.info: EngineInfo | None = EngineInfo(
            model=MODEL,
            root="",
            fingerprint="weights",
            boot_id="1",
            max_model_len=4096,
            num_blocks=1024,
            block_size=16,
            dtype=dtype,
            device="cpu",
            vocab_size=tokenizer.get_vocab_size(),
            eos_token_ids=(),
            policy="lru",
            max_batch_tokens=512,
        )
        self.load: Load | None = Load(0, 0, 0, 0, 0, 1024, 0, 0, 0, 0)
        self.url: str | None = None
        self.restarts = True
        self.down_reason: str | None = None
        self.degraded: tuple[str, ...] = ()
        self.reads_tokens = True
        self.forgiven = True
        self.tells_events = True
        self.cache_blocks = 0
        self.event_health = None
        self.model = model
        self.tells_logprobs = True
        self.asked: list[GenerationRequest] = []
        self.shadows_running = 0
        self.ended: list[str] = []
        """How each shadow ended: ``done``, ``closed`` or ``lost``."""
        self.shadow_gate = asyncio.Event()
        self.shadow_gate.set()
        self._tokenizer = tokenizer
        self._rng = rng
        self._observers: list[ReplicaObserver] = []
        self._lost = asyncio.Event()

    def observe(self, observer: ReplicaObserver) -> None:
        self._observers.append(observer)

    async def start(self) -> None:
        self.state = ReplicaState.READY
        assert self.info is not None
        for observer in self._observers:
            observer.on_ready(self, self.info)

    async def wait_ready(self, timeout: float) -> None:
        return

    def lose(self) -> None:
        """Die with what is in flight."""
        self.state, self.down_reason = ReplicaState.DOWN, "killed"
        self._lost.set()
        for observer in self._observers:
            observer.on_down(self, "killed")

    async def recover(self) -> None:
        self._lost.clear()
        self.down_reason = None
        await self.start()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        self.asked.append(request)
        if not is_shadow(request):
            for output in self._outputs(request):
                yield output
            return
        self.shadows_running += 1
        ended = "closed"
        try:
            waiting, lost = [asyncio.ensure_future(event.wait()) for event in (self.shadow_gate, self._lost)]
            try:
                await asyncio.wait([waiting, lost], return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                lost.cancel()
            if self._lost.is_set():
                ended = "lost"
                raise ReplicaLost(f"{self.id} was lost", produced=False)
            for output in self._outputs(request):
                yield output
            ended = "done"
        finally:
            self.shadows_running -= 1
            self.ended.append(ended)

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout: float = 30.0
    ) -> dict[str, Any]:
        return {}

    async def stop(self, grace: float) -> None:
        self.state = ReplicaState.STOPPED

    def _outputs(self, request: GenerationRequest) -> list[Output]:
        ids = documents_in(self._tokenizer.decode(request.token_ids, skip_special_tokens=False))
        if request.sampling.prompt_logprobs is not None:
            if not self.tells_logprobs:
                raise InvalidRequestError("prompt_logprobs is not supported")
            # The answer is as likely as its words are those that this prompt would be answered with.
            expected = set(self._tokenizer.encode(self.model(ids, self._rng)).ids)
            scores = [TokenLogprobs(id, -0.1 if id in expected else -4.0, 1) for id in request.token_ids[1:]]
            return [Output(0, "", (1,), "length", cached_tokens=0, prompt_logprobs=tuple(scores))]
        outputs = []
        for index in range(request.n):
            text = self.model(ids, self._rng)
            token_ids = tuple(self._tokenizer.encode(text).ids)
            outputs.append(Output(0, text, token_ids, "stop", cached_tokens=0, prefill_s=0.01, index=index))
        return outputs


def is_shadow(request: GenerationRequest) -> bool:
    return request.priority > 100


def documents_in(prompt: str) -> list[str]:
    return re.findall(r"\[Document (\w+)\]", prompt)


class Lab:
    """A running gateway over stubs, and requests for it. ``seed`` draws documents, orders and the sample."""

    def __init__(self, gateway: Gateway, replicas: list[StubReplica], seed: int) -> None:
        self.gateway = gateway
        self.replicas = replicas
        self.rng = random.Random(seed)
        self._number = 0

    @property
    def replica(self) -> StubReplica:
        return self.replicas[0]

    @property
    def row(self) -> Any:
        """What is known of the only template."""
        (row,) = self.gateway.quality.report()
        return row

    @property
    def shadow_requests(self) -> list[GenerationRequest]:
        return [request for replica in self.replicas for request in replica.asked if is_shadow(request)]

    def body(self, *, ids: list[str] | None = None, question: str | None = None, **fields: Any) -> ChatRequest:
        """A question with four of nine documents in the order of their relevance."""
        self._number += 1
        documents = [{"id": id, "text": f"About {id}."} for id in ids or self.rng.sample("ABCDEFGHI", 4)]
        content = question or f"Question {self._number}?"
        given = {"model": MODEL, "messages": [{"role": "user", "content": content}], "documents": documents, **fields}
        return msgspec.convert(given, ChatRequest)

    async def ask(self, body: ChatRequest | None = None, *, sampling: Sampling | None = None) -> Generation:
        """Send a request through the whole path and read its answer."""
        chat = self.body() if body is None else body
        drawn = sampling or Sampling(max_tokens=200, temperature=0.0)
        async with self.gateway.dispatcher.generate(
            lambda avoid: self.gateway.path.plan_chat(chat, CALLER, avoid),
            lambda plan, info: drawn,
            arrived=time.monotonic(),
        ) as generation:
            async for _ in generation:
                pass
        return generation

    async def compared(self) -> None:
        """Return when nothing is left to compare."""
        status = self.gateway.shadows
        await until(lambda: status.status.kept == 0 and self._idle())

    def _idle(self) -> bool:
        return all(replica.shadows_running == 0 for replica in self.replicas) and not self.gateway.shadows.comparing


ALWAYS = QualityConfig(sample=1.0)
# Port 1 refuses at once: the statistics are kept in the process.
BASE = Config(
    redis=RedisConfig(url="redis://127.0.0.1:1/0", flush_interval_s=0.05),
    canonical=CanonicalConfig(order="canonical"),
    secret="s",
)


@pytest.fixture(scope="session")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


class Labs:
    """Makes labs. ``run`` plays one scenario in a fresh one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @asynccontextmanager
    async def lab(
        self,
        model: Model = order_sensitive,
        quality: QualityConfig = ALWAYS,
        *,
        seed: int = 1,
        replicas: int = 1,
        dtype: str = "float32",
        **settings: Any,
    ) -> AsyncIterator[Lab]:
        rng = random.Random(seed)
        stubs = [StubReplica(f"engine-{i}", self.tokenizer, model, rng, dtype) for i in range(replicas)]
        config = msgspec.structs.replace(BASE, quality=quality, **settings)
        gateway = Gateway(config, model=MODEL, folder=self.folder, replicas=stubs)
        gateway.shadows._settle_s = 0.01  # type: ignore[misc]
        gateway.quality._rng.seed(seed)
        await gateway.start()
        try:
            yield Lab(gateway, stubs, seed)
        finally:
            await gateway.stop()

    def run(self, scenario: Callable[[Lab], Any], *arguments: Any, **options: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(120), self.lab(*arguments, **options) as lab:
                await scenario(lab)

        asyncio.run(main())


@pytest.fixture(scope="session")
def labs(folder: Path) -> Labs:
    return Labs(folder)
