"""Routers to be measured: Headstart, and those of others that are installed; how each is started on its replicas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.placement import BLOCK_SIZE
from benchmarks.side_by_side.openai_mock import NAME

__all__ = ["Mock", "Peer", "one_cache", "overhead_peers", "placement_peers"]

_ROUTERS: Final = ("vllm-router", "sglang-router")


class Mock(msgspec.Struct, frozen=True):
    """A server behind the routers: its URL, and where it tells of its cache by events, and repeats them."""

    url: str
    events: str = ""
    replay: str = ""


class Peer(msgspec.Struct, frozen=True):
    """A router: its command, with ``{port}`` and ``{other}`` ports, and where it says that it is ready.

    The URLs of the replicas all follow the option ``urls``; ``each`` is said once for every replica, with its
    ``{url}``, ``{events}`` and ``{replay}``. Or ``config`` makes a file of them, ``{config}`` in the command.
    """

    name: str
    command: tuple[str, ...]
    ready: str
    urls: str | None = None
    each: tuple[str, ...] = ()
    config: Callable[[Sequence[Mock]], str] | None = None
    documents: bool = False
    """Whether documents are sent as such; else they are pasted into the message."""
    order: str | None = None
    share: int = 1
    """Of so many requests that the overhead takes it gets one: the slow are not waited for as long."""


def overhead_peers(model: Path, folder: Path | None) -> list[Peer]:
    """Headstart, and those of the others that are installed in ``folder``, for requests with nothing to choose."""
    found = [_headstart("headstart", model, each=("--replica", "{url}"))]
    found += [_router(folder, name, "round_robin") for name in _ROUTERS if _installed(folder, name)]
    if folder is not None and _installed(folder, "litellm"):
        command = (str(folder / "litellm"), "--config", "{config}", "--host", "127.0.0.1", "--port", "{port}")
        found.append(Peer("litellm", command, "/health/liveliness", config=_litellm_config, share=5))
    return found


def placement_peers(model: Path, folder: Path | None) -> list[Peer]:
    """The same with all that chooses by what is cached, and without choice (round robin)."""
    told = _headstart("headstart", model, config=_headstart_config)
    found = [
        told,
        _headstart("headstart, order kept", model, config=_headstart_config, order="preserve"),
        _headstart("headstart, no events", model, each=("--replica", "{url}")),
    ]
    found += [_router(folder, name, "cache_aware") for name in _ROUTERS if _installed(folder, name)]
    if _installed(folder, "vllm-router"):
        sources = ("--kv-event-source", "{url}={events}", "--kv-event-replay-source", "{url}={replay}")
        model_options = ("--kv-event-model", NAME, "--kv-event-block-size", str(BLOCK_SIZE))
        aware = _router(folder, "vllm-router", "kv_aware")
        found.append(msgspec.structs.replace(aware, each=sources, command=(*aware.command, *model_options)))
    if _installed(folder, "sglang-router"):
        found.append(_router(folder, "sglang-router", "round_robin"))
    return found


def one_cache(model: Path) -> Peer:
    """Headstart on one replica, which is as large as all: as much as a fleet can hit."""
    return _headstart("one cache", model, config=_headstart_config)


def _installed(folder: Path | None, name: str) -> bool:
    return folder is not None and (folder / name).exists()


def _headstart(
    name: str,
    model: Path,
    *,
    each: tuple[str, ...] = (),
    config: Callable[[Sequence[Mock]], str] | None = None,
    order: str | None = None,
) -> Peer:
    run = (sys.executable, "-c", "from gateway.cli.main import main; main()", "serve")
    options = ("--model", str(model), "--host", "127.0.0.1", "--port", "{port}")
    told = () if config is None else ("--config", "{config}")
    return Peer(name, (*run, *options, *told), "/ready", each=each, config=config, documents=True, order=order)


def _headstart_config(mocks: Sequence[Mock]) -> str:
    tables = [
        f'[[replicas]]\nurl = "{mock.url}"\nevents = "{mock.events}"\nevents_replay = "{mock.replay}"\n'
        for mock in mocks
    ]
    return "\n".join(tables)


def _router(folder: Path | None, name: str, policy: str) -> Peer:
    assert folder is not None, "nothing is installed nowhere"
    launch = ("launch",) if name == "sglang-router" else ()
    options = ("--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", "{other}")
    command = (str(folder / name), *launch, *options, "--policy", policy, "--log-level", "error")
    return Peer(f"{name}, {policy}", command, "/health", "--worker-urls")


def _litellm_config(mocks: Sequence[Mock]) -> str:
    models = [
        {
            "model_name": NAME,
            "litellm_params": {"model": f"openai/{NAME}", "api_base": f"{mock.url}/v1", "api_key": "x"},
        }
        for mock in mocks
    ]
    return msgspec.json.encode({"model_list": models}).decode()  # which is YAML too
