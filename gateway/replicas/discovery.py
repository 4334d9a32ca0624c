"""Replicas that are found instead of listed: the addresses behind a DNS name, the entries of a file, looked up again.

What cannot be looked up leaves all as it was: a resolver that fails or keeps silent takes no replica out, and holds up
no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import tomllib
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog

from gateway.config import Config, ReplicaConfig
from gateway.configuration import DNS_PREFIX, check_replicas, dns_replicas
from gateway.errors import ConfigError, HeadstartError
from gateway.logs import where_from

__all__ = ["Discovery", "Resolver", "read_replica_file", "system_resolver"]

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""The IP addresses of a host name. Raises ``OSError``."""

_PATIENCE_S: Final = 5.0  # the resolver's own is 30 s and more, in which no other replica would come or go

_log = structlog.get_logger("headstart.discovery")


async def system_resolver(host: str, port: int) -> list[str]:
    """All A and AAAA records of ``host``. Raises ``OSError``."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class Discovery:
    """Looks for replicas again and again and tells whoever wants to know. Owns what it found last."""

    def __init__(self, config: Config, *, resolve: Resolver = system_resolver, patience_s: float = _PATIENCE_S) -> None:
        """``patience_s`` is how long a look waits for a resolver, seconds."""
        self._names: Final = dns_replicas(config)
        self._file: Final = None if config.discovery.file is None else Path(config.discovery.file).expanduser()
        self._interval_s: Final = config.discovery.interval_s
        self._resolve: Final = resolve
        self._patience_s: Final = patience_s
        self._listed: list[ReplicaConfig] = []
        self._addresses: dict[str, list[str]] = {}
        self._asked: dict[str, asyncio.Task[list[str]]] = {}
        self._task: asyncio.Task[None] | None = None
        self.problems: tuple[str, ...] = ()
        """What could not be looked up last time, in words."""

    @property
    def wanted(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._names) or self._file is not None

    def start(self, found: Callable[[list[ReplicaConfig]], None]) -> None:
        """Call ``found`` with all that is found, now and after every interval, until ``stop``."""
        if self.wanted:
            self._task = asyncio.create_task(self._watch(found), name="replica-discovery")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for asked in self._asked.values():
            asked.cancel()
        self._asked.clear()

    async def look(self) -> list[ReplicaConfig]:
        """The replicas that are there now, each with a URL of its own; of what cannot be looked up the last ones."""
        problems = []
        if self._file is not None:
            try:
                listed = await asyncio.to_thread(read_replica_file, self._file)
                self._listed = self._listed if listed is None else listed
            except ConfigError as error:
                problems.append(str(error))
        entries = [*self._names, *self._listed]
        names = dict.fromkeys(entry.url for entry in entries if entry.url.startswith(DNS_PREFIX))
        problems += await self._look_up(names)
        found: dict[str, ReplicaConfig] = {}
        for entry in entries:
            urls = self._addresses.get(entry.url, []) if entry.url in names else [entry.url]
            found |= {url: msgspec.structs.replace(entry, url=url) for url in urls}
        self._note(tuple(problems))
        return list(found.values())

    async def _look_up(self, names: Collection[str]) -> list[str]:
        """Ask for all names at once; what went wrong, in words.

        A resolver that does not answer keeps a thread busy. So its name is not asked for anew: the next look takes
        the answer if it has come by then.
        """
        for url in self._asked.keys() - names:
            self._asked.pop(url).cancel()
        for url in names:
            if url not in self._asked:
                self._asked[url] = asyncio.create_task(self._behind(url))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=self._patience_s)
        problems = []
        for url in names:
            if not self._asked[url].done():
                problems.append(f"{url}: no answer within {self._patience_s:g} s")
                continue
            try:
                self._addresses[url] = self._asked.pop(url).result()
            except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
                reason = error.strerror or error if isinstance(error, OSError) else "no host can have this name"
                problems.append(f"{url}: {reason}")
        return problems

    async def _behind(self, url: str) -> list[str]:
        parts = urlsplit(url.removeprefix(DNS_PREFIX))
        port = parts.port or 80
        addresses = await self._resolve(parts.hostname or "", port)
        return [f"http://{_authority(address, port)}{parts.path}" for address in addresses]

    async def _watch(self, found: Callable[[list[ReplicaConfig]], None]) -> None:
        while True:
            try:
                found(await self.look())
            except Exception as error:  # whatever it was, the next look must not suffer
                _log.error("replicas that were found cannot be used", error=where_from(error))
                reason = error.message if isinstance(error, HeadstartError) else type(error).__name__
                self.problems = (f"what was found cannot be used: {reason}",)
            await asyncio.sleep(self._interval_s)

    def _note(self, problems: tuple[str, ...]) -> None:
        for problem in problems:
            if problem not in self.problems:
                _log.warning("replicas cannot be looked up; those found last stay", reason=problem)
        if self.problems and not problems:
            _log.info("replicas are looked up again")
        self.problems = problems


def read_replica_file(path: Path) -> list[ReplicaConfig] | None:
    """The replicas in a file: one URL a line (``#`` begins a comment), or a list ``replicas`` in TOML, or one in JSON.

    None for a file without a byte, which is about to be written.

    Raises:
        ConfigError: It cannot be read, or an entry is no replica.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'}.") from error
    if not text:
        return None
    try:
        return check_replicas(msgspec.convert(_entries(path, text), tuple[ReplicaConfig | str, ...]), dns=True)
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}.") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _entries(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text).get("replicas", [])
    if text.lstrip().startswith("["):
        return msgspec.json.decode(text)
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line]


def _authority(address: str, port: int) -> str:
    return (
        f"[{address}]:{port}" if ipaddress.ip_address(address.partition("%")[0]).version == 6 else f"{address}:{port}"
    )
