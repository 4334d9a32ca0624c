"""How often each caller may call: by tenant where there are keys, by address where there are none.

A header that names an address counts only where it comes from a proxy that the operator has named. Else every request
could bring an address, and with it an allowance, of its own.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from gateway.config import Config
from gateway.errors import AuthenticationError, ConfigError, RateLimitedError
from gateway.identity import Authenticator, Headers, Peer
from gateway.plan import Caller

__all__ = ["MAX_ADDRESSES", "WINDOW_S", "Admission", "RateLimit"]

WINDOW_S: Final = 60.0

MAX_ADDRESSES: Final = 10_000
"""Addresses that are counted at a time. Whoever has more of them could send as much without having one forgotten."""

_IPV6_SITE_BITS: Final = 64
"""What a provider gives one customer, who may take any address in it."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class RateLimit:
    """``limit`` calls in ``WINDOW_S`` seconds, counted for each name from its first call on. Owns the counts.

    At most ``max_names`` are counted; then the one whose time began first is forgotten. Belongs to the event loop.
    """

    def __init__(
        self, limit: int, *, max_names: int = MAX_ADDRESSES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit: Final = limit
        self._max_names: Final = max_names
        self._clock: Final = clock
        self._calls: dict[str, tuple[float, int]] = {}  # name -> begin of its time, calls since; in order of beginning

    def __len__(self) -> int:
        return len(self._calls)

    def count(self, name: str) -> None:
        """Count a call. Raises ``RateLimitedError`` when it is one too many; that one is not counted."""
        now = self._clock()
        begun, calls = self._calls.get(name, (now, 0))
        if now - begun >= WINDOW_S:
            del self._calls[name]
            begun, calls = now, 0
        if calls >= self._limit:
            raise RateLimitedError(self._limit, retry_after=math.ceil(begun + WINDOW_S - now))
        if not calls:
            self._make_room(now)
        self._calls[name] = begun, calls + 1

    def _make_room(self, now: float) -> None:
        """Forget up to two whose time is over, so that those of a flood go; the oldest where there is no more room."""
        for name, (begun, _) in list(islice(self._calls.items(), 2)):
            if now - begun >= WINDOW_S or len(self._calls) >= self._max_names:
                del self._calls[name]


class Admission:
    """Lets callers in: whoever they are by ``authenticator``, as often as ``limits.requests_per_minute`` allows.

    Wrong keys are counted by address, right ones never are, so that nobody can shut out who shares an address.
    """

    def __init__(
        self, config: Config, authenticator: Authenticator, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ``ConfigError`` for a trusted proxy that is neither an address nor a network."""
        self._authenticator: Final = authenticator
        self._proxies: Final = _networks(config.server.trusted_proxies)
        limit = config.limits.requests_per_minute
        self._keyed: Final = bool(config.keys)
        self._tenants: Final = RateLimit(limit, clock=clock) if limit else None
        self._addresses: Final = RateLimit(limit, clock=clock) if limit else None

    @property
    def counted_addresses(self) -> int:
        """Addresses that are being counted."""
        return 0 if self._addresses is None else len(self._addresses)

    def tenant(self, peer: Peer) -> Caller:
        """Whom a call is made for; to be asked once for each.

        Raises:
            AuthenticationError: As ``Authenticator.tenant``.
            RateLimitedError: The tenant, or without keys the address, has called too often; or wrong keys have come
                from there too often.
        """
        if self._tenants is None or self._addresses is None:
            return self._authenticator.tenant(peer)
        try:
            caller = self._authenticator.tenant(peer)
        except AuthenticationError:
            self._addresses.count(self._site(peer))
            raise
        if self._keyed:
            self._tenants.count(caller.tenant)
        else:
            self._addresses.count(self._site(peer))
        return caller

    def check_operator(self, peer: Peer) -> None:
        """Let the operator pass. Raises as ``Authenticator.check_operator``, and as ``tenant`` for wrong keys."""
        try:
            self._authenticator.check_operator(peer)
        except AuthenticationError:
            if self._addresses is not None:
                self._addresses.count(self._site(peer))
            raise

    def _site(self, peer: Peer) -> str:
        """By which name a caller's address is counted: an IPv6 one with all others of its site."""
        address = _client_address(peer, self._proxies)
        if isinstance(address, ipaddress.IPv6Address):
            return str(ipaddress.IPv6Network((address, _IPV6_SITE_BITS), strict=False))
        return str(address)


def _client_address(peer: Peer, proxies: Sequence[_Network]) -> _Address | None:
    """The address nearest to us that is no trusted proxy; None for a peer without one (a unix socket)."""
    address = _parsed(peer.host or "")
    forwarded = _forwarded(peer.headers)
    while address is not None and forwarded and any(address in network for network in proxies):
        further = _parsed(forwarded.pop())
        if further is None:  # a proxy that does not say it in addresses says nothing
            break
        address = further
    return address


def _forwarded(headers: Headers) -> list[str]:
    values = [value for name, value in headers if name == b"x-forwarded-for"]
    return b",".join(values).decode("latin-1").split(",") if values else []


def _parsed(text: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(text.strip().removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address  # a dual-stack socket shows 10.0.0.1 as ::ffff:10.0.0.1


def _networks(entries: Sequence[str]) -> list[_Network]:
    try:
        return [ipaddress.ip_network(entry) for entry in entries]
    except ValueError as error:
        raise ConfigError(f"server.trusted_proxies: {error}.") from None
