"""Servers of a few shapes, each started when the first case needs it and shared by all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .models import make_model
from .servers import Server


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model that all shared servers serve."""
    return make_model(tmp_path_factory.mktemp("acceptance") / "tiny", 1)


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., Server]]:
    """``start_server(folder, **engine)``: a server that ends with the session."""
    servers: list[Server] = []

    def start(folder: Path, **options: Any) -> Server:
        servers.append(Server(folder, **options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def started(model: Path, start_server: Callable[..., Server]) -> dict[str, Server]:
    """The shared servers. They start side by side, since importing torch is most of what they do."""
    return {
        "roomy": start_server(model, kv_blocks=1024, max_batch_tokens=256, with_valkey=True),
        "pool32": start_server(model, kv_blocks=32, max_batch_tokens=256),
        "pool48": start_server(model, kv_blocks=48, max_batch_tokens=48),
    }


@pytest.fixture(scope="session")
def roomy(started: dict[str, Server]) -> Server:
    """A pool of 1,024 blocks, in which nothing is ever evicted or preempted, and statistics in a Valkey."""
    started["roomy"].wait_ready()
    return started["roomy"]


@pytest.fixture(scope="session")
def pool32(started: dict[str, Server]) -> Server:
    """A pool of 32 blocks, 512 tokens."""
    started["pool32"].wait_ready()
    return started["pool32"]


@pytest.fixture(scope="session")
def pool48(started: dict[str, Server]) -> Server:
    """A pool of 48 blocks, 768 tokens, and steps of 48 tokens."""
    started["pool48"].wait_ready()
    return started["pool48"]
