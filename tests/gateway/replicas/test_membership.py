"""Replicas that join and leave a gateway while it serves, and what the operator does with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gateway.config import AdminConfig, Config, DiscoveryConfig, EngineConfig, ReplicaConfig
from gateway.replicas.base import ReplicaState
from gateway.replicas.remote import RemoteReplicas, replica_id
from gateway.replicas.served_models import ServedModels
from gateway.server import run, serving
from gateway.service import Gateway

from ..conftest import until
from .openai_mock import CONFIG, DONE, MODEL, TIMEOUT_S, MockServer, Remote, Talk, event, usage

NO_CACHE = {"bypass": True}  # so that replicas take turns
Scenario = Callable[..., Awaitable[None]]


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


def play(
    folder: Path, scenario: Scenario, *, servers: int = 2, configured: int = 0, resolve: Any = None, **changes: Any
) -> None:
    """``scenario(remote, *servers)``; the first ``configured`` servers are replicas from the start."""

    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), AsyncExitStack() as stack:
            mocks = [await stack.enter_async_context(MockServer(folder)) for _ in range(servers)]
            config = msgspec.structs.replace(CONFIG, **_resolved(changes, mocks))
            remote = RemoteReplicas(folder, MODEL)
            replicas = [remote.connect(ReplicaConfig(mock.url)) for mock in mocks[:configured]]
            options = {} if resolve is None else {"resolve": resolve}
            gateway = Gateway(config, model=MODEL, folder=folder, replicas=replicas, connect=remote.connect, **options)
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            url = await stack.enter_async_context(serving(gateway))
            await gateway.wait_ready(TIMEOUT_S)
            await scenario(Remote(gateway, url, http), *mocks)

    run(main())


def _resolved(changes: dict[str, Any], mocks: Sequence[MockServer]) -> dict[str, Any]:
    return {name: value(mocks) if callable(value) else value for name, value in changes.items()}


def allowing(mocks: Sequence[MockServer]) -> AdminConfig:
    return AdminConfig(replica_urls=tuple(mock.url for mock in mocks))


async def ask(remote: Remote, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with remote.http.request(method, remote.url + path, json=body) as response:
        return response.status, await response.json()


async def rows(remote: Remote) -> dict[str, Any]:
    _, listed = await ask(remote, "GET", "/admin/replicas")
    return {row["url"]: row for row in listed["replicas"]}


def ready(remote: Remote) -> int:
    return remote.gateway.ready_replicas


async def who_answer(remote: Remote, **fields: Any) -> set[str]:
    """The replicas that answer four requests."""
    return {(await remote.complete(**fields))[1]["x-headstart-replica"] for _ in range(4)}


def pausing(server: MockServer) -> asyncio.Event:
    """Have a server tell one token and wait for what is returned before it ends its answer."""
    go_on = asyncio.Event()

    async def behave(talk: Talk) -> None:
        await talk.tell(1)
        await go_on.wait()
        await talk.write(event(finish="stop") + usage(1) + DONE)

    server.behave = behave
    return go_on


async def ended_well(answer: asyncio.Task[tuple[int, Any, bytes]]) -> bool:
    status, _, body = await answer
    return status == 200 and body.endswith(b"data: [DONE]\n\n")


def test_a_server_of_the_allow_list_joins_and_leaves(folder: Path) -> None:
    async def scenario(remote: Remote, one: MockServer, other: MockServer) -> None:
        status, row = await ask(remote, "POST", "/admin/replicas", {"url": other.url + "/v1", "api_key": "sk-1"})
        assert (status, row["id"], row["source"]) == (201, replica_id(other.url), "added")
        assert "sk-1" not in json.dumps(row)
        await until(lambda: ready(remote) == 2)
        assert other.headers[-1]["authorization"] == "Bearer sk-1"
        assert await who_answer(remote, headstart=NO_CACHE) == {replica_id(one.url), replica_id(other.url)}
        assert (await ask(remote, "POST", "/admin/replicas", {"url": other.url}))[0] == 409
        assert (await ask(remote, "DELETE", f"/admin/replicas/{row['id']}"))[0] == 202
        await until(lambda: len(remote.gateway.replicas) == 1)
        assert (await ask(remote, "DELETE", f"/admin/replicas/{row['id']}"))[0] == 404
        assert (await remote.complete())[0] == 200
        assert (await ask(remote, "POST", "/admin/replicas", {"url": other.url}))[0] == 201  # it may come back

    play(folder, scenario, configured=1, admin=allowing)


def test_o6_no_server_beside_the_allow_list_is_added_or_called(folder: Path) -> None:
    async def scenario(remote: Remote, listed: MockServer, listener: MockServer) -> None:
        port = listener.url.rpartition(":")[2]
        for url in (
            "http://169.254.169.254",
            "file:///",
            "http://127.0.0.1:6379",
            listener.url,
            f"https://127.0.0.1:{port}",
            f"{listed.url}\\@127.0.0.1:{port}",
            f"{listed.url}@127.0.0.1:{port}",
            f"http://user:pw@127.0.0.1:{port}",
            f"http://[::ffff:127.0.0.1]:{port}",
            f"http://127.1:{port}",
            "dns+http://localhost:80",
            "",
        ):
            status, body = await ask(remote, "POST", "/admin/replicas", {"url": url})
            assert status in (400, 403), url
            assert "pw" not in json.dumps(body)
        assert remote.gateway.replicas == {}
        assert listener.headers == []

    play(folder, scenario, admin=lambda mocks: allowing(mocks[:1]))


def test_o6_a_redirect_is_not_followed(folder: Path) -> None:
    async def scenario(remote: Remote, listener: MockServer) -> None:
        async def redirect(request: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(listener.url + request.path)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", redirect)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        # The list is read at each request; a test may put the server there when its port is known.
        remote.gateway.config = msgspec.structs.replace(  # type: ignore[misc]
            remote.gateway.config, admin=AdminConfig(replica_urls=(url,))
        )
        assert (await ask(remote, "POST", "/admin/replicas", {"url": url}))[0] == 201
        await until(lambda: remote.gateway.replicas[replica_id(url)].state is ReplicaState.DOWN)
        assert "307" in str(remote.gateway.replicas[replica_id(url)].down_reason)
        assert listener.headers == []
        await runner.cleanup()

    play(folder, scenario, servers=1, admin=AdminConfig(replica_urls=("http://placeholder:1",)))


def test_without_an_allow_list_nothing_is_added(folder: Path) -> None:
    async def scenario(remote: Remote, _one: MockServer, other: MockServer) -> None:
        assert (await ask(remote, "POST", "/admin/replicas", {"url": other.url}))[0] == 403

    play(folder, scenario, configured=1)


def test_a_leaving_replica_ends_what_it_has(folder: Path) -> None:
    async def scenario(remote: Remote, one: MockServer, other: MockServer) -> None:
        go_on = pausing(one)
        running = asyncio.create_task(remote.complete(stream=True))
        await until(lambda: one.open == 1)
        await ask(remote, "DELETE", f"/admin/replicas/{replica_id(one.url)}")
        assert await who_answer(remote) == {replica_id(other.url)}
        assert (await ask(remote, "POST", f"/admin/replicas/{replica_id(one.url)}/resume"))[0] == 409
        go_on.set()
        assert await ended_well(running)
        await until(lambda: replica_id(one.url) not in remote.gateway.replicas)

    async def main(remote: Remote, one: MockServer, other: MockServer) -> None:
        other.behave = one.behave
        await ask(remote, "POST", f"/admin/replicas/{replica_id(other.url)}/drain")  # the first request goes to one
        task = asyncio.create_task(scenario(remote, one, other))
        await until(lambda: one.open == 1)
        await ask(remote, "POST", f"/admin/replicas/{replica_id(other.url)}/resume")
        await task

    play(folder, main, configured=2)


def test_a_replica_that_is_leaving_when_the_gateway_stops_ends_what_it_has_too(folder: Path) -> None:
    async def scenario(remote: Remote, one: MockServer, other: MockServer) -> None:
        go_on = pausing(one)
        await ask(remote, "POST", f"/admin/replicas/{replica_id(other.url)}/drain")
        running = asyncio.create_task(remote.complete(stream=True))
        await until(lambda: one.open == 1)
        await ask(remote, "DELETE", f"/admin/replicas/{replica_id(one.url)}")
        ending = asyncio.create_task(remote.gateway.membership.stop(TIMEOUT_S))
        await until(lambda: remote.gateway.replicas[replica_id(other.url)].state is ReplicaState.STOPPED)
        go_on.set()
        assert await ended_well(running)
        await ending

    play(folder, scenario, configured=2)


def test_a_drained_replica_is_named_and_gets_nothing_until_it_is_resumed(folder: Path) -> None:
    async def scenario(remote: Remote, one: MockServer, other: MockServer) -> None:
        path = f"/admin/replicas/{replica_id(one.url)}"
        status, row = await ask(remote, "POST", f"{path}/drain")
        assert (status, row["draining"]) == (200, True)
        assert await who_answer(remote) == {replica_id(other.url)}
        status, readiness = await ask(remote, "GET", "/ready")
        assert status == 200
        assert f"{replica_id(one.url)}: drained by the operator" in readiness["degraded"]
        assert (await ask(remote, "POST", f"{path}/resume"))[1]["draining"] is False
        assert await who_answer(remote, headstart=NO_CACHE) == {replica_id(one.url), replica_id(other.url)}
        assert (await ask(remote, "POST", "/admin/replicas/nobody/drain"))[0] == 404
        for server in (one, other):
            await ask(remote, "POST", f"/admin/replicas/{replica_id(server.url)}/drain")
        assert (await ask(remote, "GET", "/ready"))[0] == (await remote.complete())[0] == 503

    play(folder, scenario, configured=2)


def test_the_list_says_what_the_router_knows(folder: Path) -> None:
    async def scenario(remote: Remote, one: MockServer) -> None:
        row = (await rows(remote))[one.url]
        assert (row["state"], row["source"], row["in_flight"], row["draining"]) == ("ready", "configured", 0, False)
        assert row["breaker"] == {"state": "closed", "failures": 0, "retry_in_s": 0.0}
        assert row["curve"]["fitted_to"] == "nominal"
        for _ in range(8):
            await remote.complete()
        row = (await rows(remote))[one.url]
        assert row["curve"]["fitted_to"] == "ttft"
        assert row["index"]["source"] == "requests"
        assert row["info"]["model"] == MODEL

    play(folder, scenario, servers=1, configured=1)


def test_replicas_of_a_file_join_and_leave_as_it_changes(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "replicas.txt"
    path.write_text("# none yet\n")

    async def scenario(remote: Remote, one: MockServer, other: MockServer) -> None:
        assert (await remote.complete())[0] == 503
        path.write_text(f"{one.url}\n{other.url}\n")
        await until(lambda: ready(remote) == 2)
        assert (await ask(remote, "DELETE", f"/admin/replicas/{replica_id(one.url)}"))[0] == 409
        path.write_text(f"{other.url}\n")
        await until(lambda: list(remote.gateway.replicas) == [replica_id(other.url)])
        assert (await remote.complete())[1]["x-headstart-replica"] == replica_id(other.url)
        path.write_text("nonsense\n")
        await until(lambda: bool(remote.gateway.membership.discovery.problems))
        _, readiness = await ask(remote, "GET", "/ready")
        assert any("cannot be looked up" in words for words in readiness["degraded"])
        assert (await remote.complete())[0] == 200

    play(folder, scenario, discovery=DiscoveryConfig(file=str(path), interval_s=0.1))


def test_addresses_behind_a_name_join_and_leave(folder: Path) -> None:
    addresses: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    async def scenario(remote: Remote, one: MockServer) -> None:
        assert (await remote.complete())[0] == 503
        addresses.append("127.0.0.1")
        await until(lambda: ready(remote) == 1)
        assert (await remote.complete())[1]["x-headstart-replica"] == replica_id(one.url)
        addresses.clear()
        await until(lambda: not remote.gateway.replicas)

    play(
        folder,
        scenario,
        servers=1,
        resolve=resolve,
        replicas=lambda mocks: (f"dns+http://localhost:{mocks[0].url.rpartition(':')[2]}",),
        discovery=DiscoveryConfig(interval_s=0.1),
    )


def test_callers_are_told_no_address_of_a_server_that_is_out_and_the_operator_is(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        port = server.url.rpartition(":")[2]
        waiting = asyncio.Event()

        async def behave(talk: Talk) -> None:
            waiting.set()
            await talk.wait_until_gone()

        server.behave = behave
        running = asyncio.create_task(remote.complete())
        await waiting.wait()
        server.health = 503
        for status, _, body in (await running, await remote.complete()):
            assert status in (502, 503)
            assert replica_id(server.url).encode() in body
            assert port.encode() not in body
        assert port in (await rows(remote))[server.url]["down_reason"]

    play(folder, scenario, servers=1, configured=1)


def test_a_replica_with_another_model_than_the_others_is_refused_by_name(folder: Path) -> None:
    async def scenario(remote: Remote, one: MockServer, other: MockServer) -> None:
        other.cards = [{"id": "stranger", "root": "x", "max_model_len": 2048}]
        await ask(remote, "POST", "/admin/replicas", {"url": other.url})
        stranger = remote.gateway.replicas[replica_id(other.url)]
        await until(lambda: stranger.state is ReplicaState.DOWN)
        reason = str(stranger.down_reason)
        assert "'stranger'" in reason
        assert repr(MODEL) in reason
        _, readiness = await ask(remote, "GET", "/ready")
        assert any("'stranger'" in words for words in readiness["degraded"])
        await ask(remote, "DELETE", f"/admin/replicas/{stranger.id}")
        await until(lambda: stranger.id not in remote.gateway.replicas)
        # One whose model is configured is meant.
        await ask(remote, "POST", "/admin/replicas", {"url": other.url, "model": "stranger"})
        await until(lambda: ready(remote) == 2)

    play(folder, scenario, configured=1, admin=allowing)


def test_when_all_others_have_left_a_replica_may_bring_a_new_model() -> None:
    models = ServedModels()
    models.join("a", "http://a", "old")
    models.join("a", "http://a", "new")  # alone it agrees with itself
    models.leave("a")
    models.join("b", "http://b", "newest")


def test_ids_are_the_same_everywhere_and_tell_no_address() -> None:
    assert (
        replica_id("http://10.0.0.1:8000") == replica_id("http://10.0.0.1:8000") != replica_id("http://10.0.0.2:8000")
    )
    assert "10.0" not in replica_id("http://10.0.0.1:8000")


def test_configurations_without_any_replica_are_refused_and_with_an_allow_list_are_not() -> None:
    from gateway.configuration import check_config
    from gateway.errors import ConfigError

    with pytest.raises(ConfigError, match="nothing could answer"):
        check_config(Config(engine=EngineConfig(engines=0)))
    check_config(Config(engine=EngineConfig(engines=0), admin=AdminConfig(replica_urls=("http://10.0.0.3:8000",))))
    with pytest.raises(ConfigError, match="no URL"):
        check_config(Config(admin=AdminConfig(replica_urls=("http://*.internal:8000",))))
