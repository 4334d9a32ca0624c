"""A control of pins over one scripted replica, and a real Valkey server to share them through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.config import CanonicalConfig, TemplateConfig
from gateway.pins.ceiling import Ceiling
from gateway.pins.control import PinControl
from gateway.pins.prefix import PrefixReader
from gateway.prompt import PromptRenderer
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.request_path import RequestPath
from gateway.routing.router import Router
from gateway.stats.cost import PrefillCost

from ..stats.conftest import valkey as valkey

TEMPLATES = {"support": TemplateConfig("You are helpful. " * 12), "long": TemplateConfig("You take your time. " * 30)}


class Bench:
    """A control over one scripted replica, whose clock a test sets."""

    def __init__(
        self, folder: Path, *, file: Path | None = None, secret: bytes = b"s", writer: str = "", **info: Any
    ) -> None:
        self.now = 1000.0
        self.renderer = PromptRenderer(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = {"num_blocks": 128, "max_model_len": 1024} | info
        self.replica = ScriptedReplica("engine-0", tokenizer, scripted_info(tokenizer, **settings))
        router = Router(lambda _: PrefillCost())
        path = RequestPath(
            model="m",
            secret=secret,
            canonical=CanonicalConfig(),
            templates=TEMPLATES,
            renderer=self.renderer,
            router=router,
        )
        self.control = PinControl(
            router,
            PrefixReader(path, model="m", tools=False),
            configured=(),
            file=file,
            secret=secret,
            lasting_keys=True,
            tenants=("default",),
            ceiling=Ceiling(0.5, lambda _: 0),
            quota=lambda _: 0,
            templates_generation=lambda: path.templates.generation,
            writer=writer,
            clock=lambda: self.now,
        )
        self.replica.observe(router)
        self.replica.observe(self.control)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60):
                await self.control.start()
                await self.replica.start()
                try:
                    await scenario()
                finally:
                    await self.control.stop()
                    await self.replica.stop(0)

        asyncio.run(main())

    async def told(self) -> list[Any]:
        """The pins that the engine knows of."""
        found: list[Any] = (await self.replica.call("pins"))["pins"]
        return found


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")
