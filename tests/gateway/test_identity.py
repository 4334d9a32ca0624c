"""Whom a key stands for, and who counts as the operator."""

from __future__ import annotations

import hashlib

import pytest

from gateway.config import DEFAULT_TENANT, AdminConfig, ApiKey, Config
from gateway.errors import AuthenticationError, PermissionDeniedError
from gateway.identity import Authenticator, Peer


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


_WITH_KEYS = Config(
    keys={_digest("sk-a"): ApiKey("acme"), _digest("sk-b"): ApiKey("bolt", service_class="batch")},
    admin=AdminConfig(key_sha256=_digest("sk-admin")),
)


def _peer(*values: bytes, host: str | None = "10.0.0.7", **headers: str) -> Peer:
    more = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Peer(host, [*((b"authorization", value) for value in values), *more])


def test_a_key_stands_for_its_tenant_and_class() -> None:
    authenticator = Authenticator(_WITH_KEYS)
    assert authenticator.tenant(_peer(b"Bearer sk-a")).tenant == "acme"
    caller = authenticator.tenant(_peer(b"Bearer sk-b"))
    assert (caller.tenant, caller.service_class) == ("bolt", "batch")


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"bearer sk-a"],
        [b"Basic c2stYQ=="],
        [b"sk-a"],
        [b"Bearer sk-a "],
        [b"Bearer  sk-a"],
        [b"Bearer sk-ax"],
        [b"Bearer sk-"],
        [b"Bearer SK-A"],
        ["Bearer sk-é".encode()],
        [b"Bearer sk-\xff"],
        [b"Bearer " + b"x" * 1_000_000],
        [b"Bearer sk-a", b"Bearer sk-a"],
        [b"Bearer sk-admin"],
    ],
)
def test_o1_only_the_exact_key_passes(values: list[bytes]) -> None:
    with pytest.raises(AuthenticationError):
        Authenticator(_WITH_KEYS).tenant(_peer(*values))


def test_without_keys_any_bearer_is_the_one_tenant() -> None:
    authenticator = Authenticator(Config())
    for peer in (_peer(), _peer(b"Bearer anything"), _peer(b"Basic x", host="127.0.0.1")):
        assert authenticator.tenant(peer).tenant == DEFAULT_TENANT


def test_o4_the_operator_needs_the_admin_key() -> None:
    authenticator = Authenticator(_WITH_KEYS)
    authenticator.check_operator(_peer(b"Bearer sk-admin"))
    with pytest.raises(PermissionDeniedError):
        authenticator.check_operator(_peer(b"Bearer sk-a", host="127.0.0.1"))
    for values in ([], [b"Bearer wrong"], [b"Bearer sk-admin", b"Bearer sk-admin"]):
        with pytest.raises(AuthenticationError):
            authenticator.check_operator(_peer(*values, host="127.0.0.1"))


@pytest.mark.parametrize("config", [Config(), Config(keys=_WITH_KEYS.keys)])
def test_o4_without_an_admin_key_the_operator_is_local(config: Config) -> None:
    authenticator = Authenticator(config)
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        authenticator.check_operator(Peer("::1", [(b"host", host.encode())]))


@pytest.mark.parametrize(
    "peer",
    [
        _peer(),
        _peer(host=None),
        _peer(b"Bearer sk-a", host="10.1.1.1"),
        _peer(host="127.0.0.1", x_forwarded_for="127.0.0.1"),
        _peer(host="127.0.0.1", forwarded="for=1.2.3.4"),
        _peer(host="127.0.0.1", origin="https://example.org"),
        _peer(host="127.0.0.1", origin="null"),
        Peer("127.0.0.1", [(b"host", b"rebound.example.org:8000")]),
        Peer("127.0.0.1", [(b"host", b"localhost/health?")]),
    ],
)
def test_o4_without_an_admin_key_nobody_else_is_the_operator(peer: Peer) -> None:
    with pytest.raises(PermissionDeniedError, match="admin"):
        Authenticator(Config()).check_operator(peer)
