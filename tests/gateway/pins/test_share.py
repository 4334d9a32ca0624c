"""Pins of several gateways through one Redis: in force everywhere, never lost, never twice, and without their texts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from gateway.config import Config, PinConfig, RedisConfig, ServerConfig
from gateway.pins.share import PinShare
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.server import serving
from gateway.service import Gateway
from gateway.stats.connection import StoreConnection

from ..conftest import until
from .conftest import TEMPLATES, Bench

TEXT = "Ostriches cannot fly, but they outrun nearly everything else on two legs. " * 4
DOCUMENTS = ({"id": "ostrich", "title": "Birds", "text": TEXT},)


class Side:
    """One gateway's pins, exchanged when a test says so."""

    def __init__(self, folder: Path, url: str, name: str, **options: Any) -> None:
        self.name = name
        self.bench = Bench(folder, writer=name, **options)
        self.control = self.bench.control
        self.share = PinShare(self.control)
        self.connection = StoreConnection(url)

    async def exchange(self) -> bool:
        """As the statistics do, and then the tick of the clock."""
        readable = await self.share.exchange(self.connection.client, "headstart", self.name, self.bench.now)
        await self.control.expire()
        return readable

    async def told(self) -> dict[bytes, int]:
        """The chains that the engine was told to keep: last key and length of each."""
        return {row["key"]: row["blocks"] for row in await self.bench.told()}

    @property
    def rows(self) -> dict[str, Any]:
        return {row.id: row for row in self.control.report().pins}

    @property
    def known(self) -> dict[str, Any]:
        """Every pin as all gateways have it, and when it was changed."""
        return {pin.id: (pin.expires, pin.stamp) for pin in self.control.store.shared}


@contextlib.asynccontextmanager
async def _running(*sides: Side) -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        for side in sides:
            await side.control.start()
            await side.bench.replica.start()
        try:
            yield
        finally:
            for side in sides:
                await side.control.stop()
                await side.bench.replica.stop(0)
                await side.connection.close()


async def _all(*sides: Side, rounds: int = 2) -> None:
    for _ in range(rounds):
        for side in sides:
            assert await side.exchange()


def test_a_template_pinned_at_one_gateway_is_pinned_warmed_and_given_up_at_the_other(folder: Path, valkey: Any) -> None:
    async def scenario() -> None:
        one, two = Side(folder, valkey.url, "one"), Side(folder, valkey.url, "two")
        async with _running(one, two):
            row, _ = await one.control.create(PinConfig("support"), 60.0)
            await _all(one, two)
            assert two.known == one.known
            assert two.rows[row.id].source == "api"
            assert await two.told() == await one.told() != {}
            await until(lambda: two.rows[row.id].state == "resident")
            # The other one may give it another end, or an end.
            again, created = await two.control.create(PinConfig("support"), 90.0)
            assert (again.id, created) == (row.id, False)
            await _all(two, one)
            assert one.rows[row.id].expires == 1090.0
            await one.control.delete(row.id)
            await _all(one, two)
            assert one.rows == two.rows == {}
            assert await two.told() == {}
            with valkey.client() as client:
                assert client.hlen("headstart:pins") == 1  # that it was given up

    asyncio.run(scenario())


def test_pinned_documents_are_kept_by_their_keys_where_their_texts_are_not(folder: Path, valkey: Any) -> None:
    async def scenario() -> None:
        one, two = Side(folder, valkey.url, "one"), Side(folder, valkey.url, "two")
        async with _running(one, two):
            wish = PinConfig("support", DOCUMENTS, cache_salt="pepper")
            row, _ = await one.control.create(wish)
            await _all(one, two)
            there = two.rows[row.id]
            assert (there.source, there.kind, there.documents, there.template) == (
                "elsewhere", "documents", ["ostrich"], "support",
            )  # fmt: skip
            assert "has its texts" in (there.replicas["engine-0"].note or "")
            assert await two.told() == await one.told() != {}
            with valkey.client() as client:
                told = b"".join(value for field in client.hgetall("headstart:pins").items() for value in field)
            for secret in (b"Ostrich", b"Birds", b"pepper"):
                assert secret not in told
            assert b'"ostrich"' in told
            # Who has the texts too pins it in full; the first one keeps its own.
            same, created = await two.control.create(wish)
            assert (same.id, same.source, created) == (row.id, "api", False)
            await _all(two, one)
            assert one.rows[row.id].source == "api"
            assert len(one.known) == len(two.known) == 1

    asyncio.run(scenario())


def test_gateways_with_other_keys_for_a_pin_claim_it_once_each_and_again_when_it_is_made_anew(
    folder: Path, valkey: Any
) -> None:
    async def scenario() -> None:
        one, two = Side(folder, valkey.url, "one"), Side(folder, valkey.url, "two", block_size=32)
        async with _running(one, two):
            for _ in range(2):
                for side in (one, two):
                    row, _ = await side.control.create(PinConfig("support", DOCUMENTS))
                made = two.control.store.stamp(row.id)
                await _all(one, two, rounds=8)
                claimed = two.control.store.stamp(row.id)
                assert claimed.version == made.version + 2
                await _all(one, two, rounds=4)
                assert two.control.store.stamp(row.id) == one.control.store.stamp(row.id) == claimed, "nobody gives way"
                await one.control.delete(row.id)
                await _all(one, two)
                assert one.rows == two.rows == {}
                for side in (one, two):
                    side.bench.now += 61.0  # after which all is read again
                await _all(one, two)

    asyncio.run(scenario())


def test_pins_outlast_gateways_and_redis_as_long_as_one_of_them_knows(
    folder: Path, valkey: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        files = {name: tmp_path / f"{name}.json" for name in ("one", "two")}

        def start(name: str, life: int) -> Side:
            return Side(folder, valkey.url, f"{name}-{life}", file=files[name])

        one, two = start("one", 1), start("two", 1)
        async with _running(one, two):
            kept, _ = await one.control.create(PinConfig("support"))
            borrowed, _ = await one.control.create(PinConfig("support", DOCUMENTS))
            await _all(one, two)
        two = start("two", 2)
        with valkey.client() as client:
            client.flushall()
        async with _running(two):
            two.share.write_all()
            assert set(two.rows) == {kept.id, borrowed.id}
            assert two.rows[borrowed.id].source == "elsewhere"
            await _all(two)
            await two.control.delete(kept.id)
            await _all(two)
        one = start("one", 2)  # was off, and its file still has what was given up
        async with _running(one):
            assert set(one.rows) == {kept.id, borrowed.id}
            await _all(one)
            assert set(one.rows) == {borrowed.id}
            assert one.rows[borrowed.id].source == "api"
        new = Side(folder, valkey.url, "three")
        async with _running(new):
            await _all(new)
            assert set(new.rows) == {borrowed.id}
            assert len(await new.told()) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_is_done_at_once_all_gateways_come_to_the_same(seed: int, folder: Path, valkey: Any) -> None:
    choose = random.Random(seed)
    wishes = [*map(PinConfig, TEMPLATES), PinConfig("support", DOCUMENTS), PinConfig(keys=("00" * 16,))]

    async def scenario() -> None:
        sides = [Side(folder, valkey.url, name) for name in ("one", "two", "three")]
        done: dict[
            str, tuple[Any, bool]
        ] = {}  # the change of each pin with the greatest stamp, and whether it is there

        async def act(side: Side) -> None:
            wish = choose.choice(wishes)
            if choose.random() < 0.6:
                row, _ = await side.control.create(wish, choose.choice([None, 500.0]))
                id, there = row.id, True
            elif side.rows:
                id, there = choose.choice(sorted(side.rows)), False
                await side.control.delete(id)
            else:
                return
            stamp = side.control.store.stamp(id)
            if id not in done or stamp > done[id][0]:
                done[id] = stamp, there

        async with _running(*sides):
            for _ in range(40):
                side = choose.choice(sides)
                side.bench.now += choose.choice([0.0, 0.0, 0.3])  # clocks that differ
                await act(side)
                if choose.random() < 0.4:
                    await choose.choice(sides).exchange()
                if choose.random() < 0.1:
                    with valkey.client() as client:
                        client.flushall()
                    for each in sides:
                        each.share.write_all()
            await _all(*sides, rounds=3)
            wanted = {id: stamp for id, (stamp, there) in done.items() if there}
            for each in sides:
                assert {id: stamp for id, (_, stamp) in each.known.items()} == wanted
                assert await each.told() == await sides[0].told()
            with valkey.client() as client:
                assert client.hlen("headstart:pins") == len(done)

    asyncio.run(scenario())


def test_what_redis_has_of_others_is_taken_with_care(folder: Path, valkey: Any) -> None:
    async def scenario() -> None:
        one = Side(folder, valkey.url, "one")
        stranger = Side(folder, valkey.url, "stranger", secret=b"another")
        async with _running(one, stranger):
            row, _ = await stranger.control.create(PinConfig("support", DOCUMENTS))
            await _all(stranger, one)
            assert "another deployment secret" in (one.rows[row.id].problem or "")
            assert await one.told() == {}
            with valkey.client() as client:
                for field, value in {"x": "y", "pin-1 one w": "{}", "pin-2 1 w": '{"keys": 3}'}.items():
                    client.hset("headstart:pins", field, value)
                client.hset("headstart:pins", "pin-3 1 w", '{"template": "none", "tenant": "default", "keys": []}')
                client.incr("headstart:pins:changes")
                assert not await one.exchange()
                assert "no template 'none'" in (one.rows["pin-3"].problem or "")
                assert client.hexists("headstart:pins", "x")
                # Over for long: nobody takes it over, somebody takes it away.
                client.hset("headstart:pins", "pin-4 1 w", '{"template": "support", "tenant": "default", "expires": 9}')
                client.hset("headstart:pins", "pin-5 1 w", '{"removed": true}')
                template = '{"template": "support", "tenant": "default"}'
                for name in ("pin-6 99999999999999999999 w", "pin-7 1_0 w"):  # no file could keep it, nobody remove it
                    client.hset("headstart:pins", name, template)
                one.bench.now = time.time()
                await one.exchange()
                assert set(one.rows) == {row.id, "pin-3"}
                left = {name.decode().partition(" ")[0] for name in client.hkeys("headstart:pins")}
                assert left == {row.id, "pin-1", "pin-2", "pin-3", "pin-6", "pin-7", "x"}

    asyncio.run(scenario())


def test_two_gateways_agree_within_seconds_and_no_request_minds_that_redis_is_gone(
    model_folder: Callable[[str], Path], valkey: Any
) -> None:
    folder = model_folder("chatml")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = Config(
        server=ServerConfig(port=0, drain_grace_s=5),
        redis=RedisConfig(url=valkey.url, flush_interval_s=0.05),
        templates=TEMPLATES,
        secret="s",
    )

    def gateway() -> Gateway:
        replica = ScriptedReplica("engine-0", tokenizer, scripted_info(tokenizer, root=str(folder)))
        return Gateway(config, model="scripted", folder=folder, replicas=[replica])

    async def pinned(http: aiohttp.ClientSession, url: str) -> list[str]:
        async with http.get(f"{url}/admin/pins") as response:
            return [row["id"] for row in (await response.json())["pins"]]

    async def agreed(http: aiohttp.ClientSession, wanted: str, *urls: str) -> None:
        deadline = time.monotonic() + 60
        while True:
            found = [await pinned(http, url) for url in urls]
            if found == [[wanted]] * len(urls):
                return
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        async with (
            serving(gateway()) as one,
            serving(gateway()) as two,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http,
        ):

            async def pin(url: str, template: str) -> str:
                async with http.post(f"{url}/admin/pins", json={"template": template}) as response:
                    assert response.status == 201, await response.text()
                    return str((await response.json())["id"])

            async def ask(url: str) -> None:
                body = {"model": "scripted", "prompt": "x", "max_tokens": 2}
                async with http.post(f"{url}/v1/completions", json=body) as response:
                    assert response.status == 200

            first = await pin(one, "support")
            await agreed(http, first, two)
            valkey.kill()
            second = await pin(two, "long")
            async with http.delete(f"{one}/admin/pins/{first}") as response:
                assert response.status == 204
            await asyncio.gather(*[ask(url) for url in (one, two) for _ in range(5)])
            valkey.start()
            await agreed(http, second, one, two)

    asyncio.run(asyncio.wait_for(scenario(), 60))
