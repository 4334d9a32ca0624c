"""Which prefixes are hot: told by counts that stay bounded, grow old and add up over gateways."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.config import Config, RedisConfig, ServerConfig, TemplateConfig
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.service import Gateway
from gateway.stats.hot_prefixes import HALF_LIFE_S, MAX_KEYS, SAMPLE, HotPrefixes

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


class _Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def chain(name: str, blocks: int, after: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    """``after``, and so many keys of its own behind it."""
    return after + tuple(hashlib.md5(f"{name} {i}".encode()).digest() for i in range(blocks))


SYSTEM = chain("system", 8)
DOCUMENT = chain("document", 20, SYSTEM)


def asked(prefixes: HotPrefixes, keys: tuple[bytes, ...], times: int, tenant: str = "default") -> None:
    for _ in range(times * SAMPLE):
        prefixes.observe(tenant, "support", keys)


def test_a_prefix_is_shown_where_its_requests_part() -> None:
    prefixes = HotPrefixes(clock=_Time())
    for number in range(30):
        asked(prefixes, chain(f"question {number}", 3, DOCUMENT), 1)
        asked(prefixes, chain(f"other {number}", 40, SYSTEM), 1)
    shown = [(row.key, row.blocks, row.requests) for row in prefixes.report()]
    assert shown == [
        (DOCUMENT[-1].hex(), 28, 30 * SAMPLE),
        (SYSTEM[-1].hex(), 8, 60 * SAMPLE),
    ]


def test_what_was_hot_gives_way() -> None:
    clock = _Time()
    prefixes = HotPrefixes(clock=clock)
    asked(prefixes, SYSTEM, 100)
    assert [row.key for row in prefixes.report()] == [SYSTEM[-1].hex()]
    for _ in range(8):
        clock.now += HALF_LIFE_S
        asked(prefixes, DOCUMENT[8:], 10)
    (row,) = prefixes.report()
    assert row.key == DOCUMENT[-1].hex()
    assert row.requests < 2 * 10 * SAMPLE


def test_what_is_kept_stays_bounded_and_keeps_what_is_hot() -> None:
    prefixes = HotPrefixes(clock=_Time())
    asked(prefixes, SYSTEM, 10)
    for number in range(MAX_KEYS // 10):
        asked(prefixes, chain(f"once {number}", 20), 1)
        assert len(prefixes) <= MAX_KEYS
    assert [row.key for row in prefixes.report()] == [SYSTEM[-1].hex()]


def test_gateways_add_up_and_what_is_no_note_is_told() -> None:
    one, two = HotPrefixes(clock=_Time()), HotPrefixes(clock=_Time())
    asked(one, SYSTEM, 3)
    asked(two, DOCUMENT, 4)
    assert one.read({"two": two.write()})
    assert [(row.key, row.requests) for row in one.report()] == [
        (DOCUMENT[-1].hex(), 4 * SAMPLE), (SYSTEM[-1].hex(), 7 * SAMPLE),
    ]  # fmt: skip
    assert not one.read({"two": two.write(), "three": b"nonsense"})
    assert len(one.report()) == 2
    assert one.read({})
    assert len(one.report()) == 1


def test_gateways_know_of_each_other_what_they_have_and_where_they_differ(
    valkey: Any, eventually: Eventually, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder("chatml")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def gateway(id: str, **changes: Any) -> Gateway:
        config = Config(
            server=ServerConfig(port=0),
            redis=RedisConfig(url=valkey.url, flush_interval_s=0.02),
            templates={"support": TemplateConfig("You are helpful."), "same": TemplateConfig("You are the same.")},
            secret="a",
        )
        replica = ScriptedReplica(id, tokenizer, scripted_info(tokenizer, root=str(folder)))
        return Gateway(msgspec.structs.replace(config, **changes), model="m", folder=folder, replicas=[replica])

    async def scenario() -> None:
        different = {"support": TemplateConfig("You are terse."), "same": TemplateConfig("You are the same.")}
        gateways = [gateway("one"), gateway("two", templates=different), gateway("three", secret="b")]
        for each in gateways:
            await each.start()
        one, two, three = (each.presence for each in gateways)
        gateways[1].statistics.prefixes.observe("default", "t", SYSTEM)
        await eventually(lambda: len(one.others) == len(two.others) == len(three.others) == 2)
        assert {row.id for other in one.others.values() for row in other.replicas} == {"two", "three"}
        await eventually(lambda: all(row.state == "ready" for other in one.others.values() for row in other.replicas))
        assert [words.partition(":")[0] for words in one.problems] == [
            "1 other gateways have another secret",
            "template 'support' is another one at other gateways",
        ]
        assert [words.partition(":")[0] for words in three.problems] == ["2 other gateways have another secret"]
        with valkey.client() as client:
            notes = b"".join(client.get(key) for key in client.scan_iter("headstart:gateways:*"))
            assert all(0 < client.ttl(key) <= 60 for key in client.scan_iter("headstart:gateways:*"))
        assert b"helpful" not in notes
        assert b"support" in notes
        for each in gateways:
            await each.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))
