"""Who is asking: API keys to tenants, the admin key to the operator.

Keys are kept as SHA-256 digests and compared as digests in constant time, so that nothing about a key can be learned
from how long an answer takes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

import msgspec

from gateway.config import DEFAULT_TENANT, Config
from gateway.configuration import is_loopback
from gateway.errors import AuthenticationError, PermissionDeniedError
from gateway.plan import Caller

__all__ = ["Authenticator", "Headers", "Peer"]

_SCHEME: Final = b"Bearer "
_FORWARDING_HEADERS: Final = frozenset((b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"))

Headers = Iterable[tuple[bytes, bytes]]


class Peer(msgspec.Struct, frozen=True):
    """The other end of a connection as the socket and the server see it: ``host`` is never taken from a header."""

    host: str | None
    headers: Headers


class Authenticator:
    """Turns a request's headers into a ``Caller``. Holds no mutable state.

    Without configured keys there is one tenant, and whatever is sent as a bearer is accepted. Without an admin key the
    operator's routes answer to this machine alone: to a loopback peer that speaks for itself (no proxy in between)
    and addresses the gateway by a loopback name (so that no web page can reach it through a rebound host name).
    """

    def __init__(self, config: Config) -> None:
        self._keys = [
            (bytes.fromhex(digest), Caller(tenant=key.tenant, service_class=key.service_class))
            for digest, key in config.keys.items()
        ]
        self._admin = bytes.fromhex(config.admin.key_sha256) if config.admin.key_sha256 else None
        self._anyone = Caller(tenant=DEFAULT_TENANT)

    def tenant(self, peer: Peer) -> Caller:
        """Whom a call to the OpenAI routes is made for.

        Raises:
            AuthenticationError: Keys are configured and none of them was presented.
        """
        if not self._keys:
            return self._anyone
        digest = _presented_digest(peer.headers)
        caller = self._lookup(digest) if digest is not None else None
        if caller is None:
            raise AuthenticationError("Send a valid API key in the header 'Authorization: Bearer KEY'.")
        return caller

    def check_operator(self, peer: Peer) -> None:
        """Let the operator pass, on the routes that are theirs alone.

        Raises:
            AuthenticationError: No key, or one that nobody has.
            PermissionDeniedError: A tenant's key, or a caller from elsewhere while no admin key is configured.
        """
        if self._admin is None:
            if not _is_local(peer):
                raise PermissionDeniedError(
                    "No admin key is configured, so this answers on the gateway's own machine only. "
                    "Set admin.key_sha256 (`headstart hash-key`) to use it from elsewhere."
                )
            return
        digest = _presented_digest(peer.headers)
        if digest is not None and hmac.compare_digest(digest, self._admin):
            return
        if digest is not None and self._lookup(digest) is not None:
            raise PermissionDeniedError("This needs the admin key; an API key of a tenant is not enough.")
        raise AuthenticationError("Send the admin key in the header 'Authorization: Bearer KEY'.")

    def is_operator(self, peer: Peer) -> bool:
        """Whether ``check_operator`` lets this caller pass."""
        try:
            self.check_operator(peer)
        except (AuthenticationError, PermissionDeniedError):
            return False
        return True

    def _lookup(self, digest: bytes) -> Caller | None:
        """Compares with every key, whichever it is: some 0.2 µs each, and no early end to measure."""
        found: Caller | None = None
        for known, caller in self._keys:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def _presented_digest(headers: Headers) -> bytes | None:
    """The digest of the one bearer key in the headers; None when there is none, or more than one header."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1 or not values[0].startswith(_SCHEME):
        return None
    key = values[0][len(_SCHEME) :]
    return hashlib.sha256(key).digest() if key else None


def _is_local(peer: Peer) -> bool:
    if peer.host is None or not is_loopback(peer.host):
        return False
    hosts = []
    for name, value in peer.headers:
        if name in _FORWARDING_HEADERS:
            return False
        if name == b"origin":
            hosts.append(value.partition(b"://")[2])
        elif name == b"host":
            hosts.append(value)
    return all(is_loopback(_host_name(host)) for host in hosts)


def _host_name(host: bytes) -> str:
    """``Host`` without its port."""
    text = host.decode("latin-1")
    if text.startswith("["):
        return text.partition("]")[0].removeprefix("[")
    return text.partition(":")[0]
