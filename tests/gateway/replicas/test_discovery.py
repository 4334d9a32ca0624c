from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.config import Config, DiscoveryConfig, ReplicaConfig
from gateway.errors import ConfigError
from gateway.replicas.discovery import Discovery, read_replica_file

from ..conftest import until


class Names:
    """A resolver under a test's control."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if host not in self.addresses:
            raise OSError(-2, "Name or service not known")
        return self.addresses[host]


def look(discovery: Discovery) -> list[str]:
    return [replica.url for replica in asyncio.run(discovery.look())]


def test_every_address_behind_a_name_is_a_replica_with_the_names_settings() -> None:
    names = Names(vllm=["10.0.0.7", "fd00::7"])
    entry = ReplicaConfig("dns+http://vllm:8000/base/v1", model="m", api_key="k")
    found = asyncio.run(Discovery(Config(replicas=(entry, "http://10.0.0.1:8000")), resolve=names).look())
    assert [replica.url for replica in found] == ["http://10.0.0.7:8000/base", "http://[fd00::7]:8000/base"]
    assert {(replica.model, replica.api_key) for replica in found} == {("m", "k")}
    assert names.asked == [("vllm", 8000)]


def test_addresses_come_and_go_and_a_resolver_that_fails_takes_none_out() -> None:
    names = Names(vllm=["10.0.0.7"])
    discovery = Discovery(Config(replicas=("dns+http://vllm",)), resolve=names)
    assert look(discovery) == ["http://10.0.0.7:80"]
    names.addresses["vllm"] = ["10.0.0.8", "10.0.0.9"]
    assert look(discovery) == ["http://10.0.0.8:80", "http://10.0.0.9:80"]
    del names.addresses["vllm"]
    assert look(discovery) == ["http://10.0.0.8:80", "http://10.0.0.9:80"]
    assert "Name or service not known" in discovery.problems[0]
    names.addresses["vllm"] = ["10.0.0.9"]
    assert look(discovery) == ["http://10.0.0.9:80"]
    assert discovery.problems == ()


def test_a_name_that_no_host_can_have_takes_no_other_replica_out() -> None:
    names = Names(vllm=["10.0.0.7"])

    async def resolve(host: str, port: int) -> list[str]:
        host.encode("idna")  # as the system's resolver does first
        return await names(host, port)

    for impossible in ("a..b", "a" * 64):
        discovery = Discovery(Config(replicas=(f"dns+http://{impossible}", "dns+http://vllm")), resolve=resolve)
        assert look(discovery) == ["http://10.0.0.7:80"]
        assert discovery.problems == (f"dns+http://{impossible}: no host can have this name",)


def test_a_name_without_an_answer_holds_up_no_other_and_is_asked_for_once_until_it_comes() -> None:
    names = Names(silent=["10.0.0.8"], vllm=["10.0.0.7"])

    async def main() -> None:
        answers = asyncio.Event()

        async def resolve(host: str, port: int) -> list[str]:
            found = await names(host, port)
            if host == "silent":
                await answers.wait()
            return found

        config = Config(replicas=("dns+http://silent", "dns+http://vllm"))
        discovery = Discovery(config, resolve=resolve, patience_s=0.05)
        for _ in range(2):
            assert [replica.url for replica in await discovery.look()] == ["http://10.0.0.7:80"]
            assert discovery.problems == ("dns+http://silent: no answer within 0.05 s",)
        assert [host for host, _ in names.asked].count("silent") == 1
        answers.set()
        assert len(await discovery.look()) == 2
        assert discovery.problems == ()

    asyncio.run(main())


def test_looking_goes_on_whatever_becomes_of_what_was_found() -> None:
    found: list[str] = []

    def refuse_the_first(replicas: list[ReplicaConfig]) -> None:
        found.extend(replica.url for replica in replicas)
        if len(found) == 1:
            raise ConfigError("There is no tokenizer.")

    async def main() -> None:
        config = Config(replicas=("dns+http://vllm",), discovery=DiscoveryConfig(interval_s=0.1))
        discovery = Discovery(config, resolve=Names(vllm=["10.0.0.7"]))
        discovery.start(refuse_the_first)
        await until(lambda: bool(discovery.problems))
        assert discovery.problems == ("what was found cannot be used: There is no tokenizer.",)
        await until(lambda: len(found) == 2 and not discovery.problems)
        await discovery.stop()

    asyncio.run(main())


def file_of(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("replicas.txt", "# two\nhttp://10.0.0.1:8000/v1   # the first\n\nHTTP://10.0.0.2:8000\n"),
        ("replicas.json", '["http://10.0.0.1:8000", {"url": "http://10.0.0.2:8000/"}]'),
        ("replicas.toml", 'replicas = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]'),
    ],
)
def test_a_file_lists_replicas_in_lines_json_or_toml(tmp_path: Path, name: str, text: str) -> None:
    replicas = read_replica_file(file_of(tmp_path / name, text))
    assert replicas is not None
    assert [replica.url for replica in replicas] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", "ftp://10.0.0.1"), ("a.txt", "http://u:secret@h"), ("a.json", "[1]"), ("a.json", "["), ("a.toml", "x=")],
)
def test_a_file_that_lists_something_else_is_refused_by_its_name(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read_replica_file(file_of(tmp_path / name, text))
    assert "secret" not in caught.value.message


def test_a_file_is_read_again_and_one_that_cannot_be_read_takes_no_replica_out(tmp_path: Path) -> None:
    path = file_of(tmp_path / "replicas.txt", "http://a:1\n")
    discovery = Discovery(Config(discovery=DiscoveryConfig(file=str(path))))
    assert look(discovery) == ["http://a:1"]
    file_of(path, "http://a:1\nhttp://b:1\n")
    assert look(discovery) == ["http://a:1", "http://b:1"]
    for unreadable in ("", "no url"):
        file_of(path, unreadable)
        assert look(discovery) == ["http://a:1", "http://b:1"]
    assert "replicas.txt" in discovery.problems[0]
    path.unlink()
    assert look(discovery) == ["http://a:1", "http://b:1"]
    file_of(path, "# none any more\n")
    assert look(discovery) == []


def test_names_in_a_file_are_looked_up_too(tmp_path: Path) -> None:
    path = file_of(tmp_path / "replicas.txt", "dns+http://vllm:8000\n")
    names = Names(vllm=["10.0.0.7"])
    discovery = Discovery(Config(discovery=DiscoveryConfig(file=str(path))), resolve=names)
    assert look(discovery) == ["http://10.0.0.7:8000"]


def test_a_certificate_is_for_a_name_and_not_for_the_addresses_behind_it() -> None:
    with pytest.raises(ConfigError, match="no URL"):
        Discovery(Config(replicas=("dns+https://vllm:8000",)))
