"""How often callers are let in, and by what they are told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from gateway.admission import MAX_ADDRESSES, WINDOW_S, Admission, RateLimit
from gateway.config import AdminConfig, ApiKey, Config, LimitsConfig, ServerConfig
from gateway.errors import AuthenticationError, ConfigError, RateLimitedError
from gateway.identity import Authenticator, Peer
from gateway.plan import Caller


class Time:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _admission(*, keys: dict[str, ApiKey] | None = None, proxies: tuple[str, ...] = (), limit: int = 3) -> Admission:
    config = Config(
        server=ServerConfig(trusted_proxies=proxies),
        limits=LimitsConfig(requests_per_minute=limit),
        keys=keys or {},
        admin=AdminConfig(key_sha256="f" * 64),
    )
    return Admission(config, Authenticator(config), clock=Time())


def _peer(host: str | None, *forwarded: str, **headers: str) -> Peer:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Peer(host, [*((b"x-forwarded-for", value.encode()) for value in forwarded), *named])


def _let_in(admission: Admission, peers: list[Peer]) -> int:
    let_in = 0
    for peer in peers:
        try:
            admission.tenant(peer)
        except RateLimitedError:
            continue
        let_in += 1
    return let_in


def test_a_name_has_its_calls_again_when_its_minute_is_over() -> None:
    clock = Time()
    limit = RateLimit(2, clock=clock)
    limit.count("a")
    clock.now += 20
    limit.count("a")
    with pytest.raises(RateLimitedError) as refused:
        limit.count("a")
    assert refused.value.retry_after == 40
    limit.count("b")
    clock.now += 39
    with pytest.raises(RateLimitedError):
        limit.count("a")
    clock.now += 1
    limit.count("a")


def test_refused_calls_do_not_lengthen_the_wait() -> None:
    clock = Time()
    limit = RateLimit(1, clock=clock)
    limit.count("a")
    for _ in range(100):
        clock.now += WINDOW_S / 101
        with pytest.raises(RateLimitedError):
            limit.count("a")
    clock.now += 1
    limit.count("a")


def test_o7_what_is_counted_stays_bounded_under_a_flood_of_addresses() -> None:
    limit = RateLimit(3, clock=Time())
    for number in range(100_000):
        limit.count(f"203.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(limit) == MAX_ADDRESSES


def test_what_is_over_is_forgotten() -> None:
    clock = Time()
    limit = RateLimit(1, clock=clock)
    for number in range(50):
        limit.count(f"old {number}")
    clock.now += WINDOW_S
    for number in range(50):
        limit.count(f"new {number}")
    assert len(limit) == 50


def test_o7_no_header_of_a_stranger_makes_another_caller_of_it() -> None:
    peers = [
        _peer("198.51.100.7", f"10.0.0.{i}", x_real_ip=f"10.0.1.{i}", forwarded=f"for=10.0.2.{i}") for i in range(100)
    ]
    assert _let_in(_admission(), peers) == 3
    assert _let_in(_admission(proxies=("203.0.113.1",)), peers) == 3


def test_o7_a_trusted_proxy_tells_callers_apart() -> None:
    proxies = ("203.0.113.1", "10.0.0.0/8", "2001:db8::/32")
    admission = _admission(proxies=proxies)
    assert _let_in(admission, [_peer("203.0.113.1", f"198.51.100.{i}") for i in range(20)]) == 20
    # What a caller writes in front of its own address changes nothing, nor does a chain of proxies or a second header.
    same = [
        _peer("203.0.113.1", f"192.0.2.{i}, 198.51.100.0", f"10.0.0.{i}", x_real_ip=f"192.0.2.{i}") for i in range(20)
    ]
    assert _let_in(admission, same) == 2
    assert _let_in(admission, [_peer("::ffff:203.0.113.1", "198.51.100.0")]) == 0
    assert _let_in(admission, [_peer("203.0.113.1", f"198.51.100.99, unknown-{i}") for i in range(20)]) == 3


def test_addresses_of_one_ipv6_site_are_one_caller() -> None:
    admission = _admission()
    assert _let_in(admission, [_peer(f"2001:db8:1:2::{i:x}") for i in range(1, 20)]) == 3
    assert _let_in(admission, [_peer("2001:db8:1:3::1")]) == 1


def test_with_keys_a_tenant_is_counted_wherever_it_calls_from() -> None:
    keys = {_digest("sk-a"): ApiKey("acme"), _digest("sk-b"): ApiKey("bolt")}
    admission = _admission(keys=keys)
    peers = [_peer(f"198.51.100.{i}", authorization="Bearer sk-a") for i in range(20)]
    assert _let_in(admission, peers) == 3
    assert admission.tenant(_peer("198.51.100.1", authorization="Bearer sk-b")) == Caller("bolt")


def test_o7_wrong_keys_are_counted_by_address_and_shut_out_no_right_one() -> None:
    admission = _admission(keys={_digest("sk-a"): ApiKey("acme")})

    def tries(check: Callable[[Peer], object], host: str) -> list[type[Exception]]:
        found = []
        for i in range(10):
            with pytest.raises((AuthenticationError, RateLimitedError)) as refused:
                check(_peer(host, authorization=f"Bearer wrong-{i}"))
            found.append(refused.type)
        return found

    expected = [AuthenticationError] * 3 + [RateLimitedError] * 7
    assert tries(admission.tenant, "198.51.100.1") == expected
    assert tries(admission.check_operator, "198.51.100.2") == expected
    assert admission.tenant(_peer("198.51.100.1", authorization="Bearer sk-a")).tenant == "acme"


def test_without_a_limit_nothing_is_counted() -> None:
    admission = _admission(limit=0)
    assert _let_in(admission, [_peer("198.51.100.1")] * 1000) == 1000
    assert admission.counted_addresses == 0


def test_a_proxy_that_is_no_address_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"server\.trusted_proxies.*proxy\.example"):
        _admission(proxies=("proxy.example",))
