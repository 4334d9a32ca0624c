from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from gateway import local_file, template_store
from gateway.canonical.registry import TemplateRegistry
from gateway.config import TemplateConfig
from gateway.errors import ConfigError, ConflictError, HeadstartError, InvalidRequestError, TemplateNotFoundError
from gateway.stats.sums import OTHER
from gateway.template_store import TemplateStore

CONFIGURED = {"fixed": TemplateConfig("You are fixed at {now}.")}


def registry() -> TemplateRegistry:
    return TemplateRegistry(CONFIGURED, normalize=True)


def recognised(templates: TemplateRegistry, text: str) -> tuple[str, int] | None:
    found = templates.recognize(text)
    return None if found is None else (found.template.name, found.template.version)


def test_each_write_of_a_name_makes_its_next_version_and_older_texts_stay_recognised(tmp_path: Path) -> None:
    async def scenario() -> None:
        templates = registry()
        store = TemplateStore(tmp_path / "t.json", templates)
        for text in ("Hello {a}.", "Good day {a}."):
            await store.create("greet", TemplateConfig(text))
        assert [version.version for version in store.versions("greet")] == [1, 2]
        assert templates.named("greet") == templates.named("greet@2")
        assert templates.named("greet@1").literals == ("Hello ", ".")
        assert recognised(templates, "Hello Ann.") == ("greet", 1)
        assert recognised(templates, "Good day Ann.") == ("greet", 2)
        await store.create("greet", TemplateConfig("Hello {a}.", order="preserve"))
        assert recognised(templates, "Hello Ann.") == ("greet", 3)  # the last one says what is wanted

    asyncio.run(scenario())


def test_what_was_written_is_there_after_a_restart_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    async def write() -> None:
        store = TemplateStore(path, registry())
        await store.create("a", TemplateConfig("A {x}!", order="canonical", hoist="off"))
        await store.create("b", TemplateConfig("B {x}!"))
        await store.create("b", TemplateConfig("C {x}!"))
        await store.delete("b", 2)

    asyncio.run(write())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]
    templates = registry()
    store = TemplateStore(path, templates)
    assert store.names() == ["a", "b"]
    assert templates.named("a").config == TemplateConfig("A {x}!", order="canonical", hoist="off")
    assert recognised(templates, "C 1!") is None

    async def write_again() -> None:
        assert (await store.create("b", TemplateConfig("D {x}!"))).version == 3  # a number means one text for ever

    asyncio.run(write_again())


def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        templates = registry()
        store = TemplateStore(tmp_path / "t.json", templates)
        await store.create("a", TemplateConfig("A {x}!"))
        before = (tmp_path / "t.json").read_bytes()

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(local_file.os, "fsync", full)
        for change in (store.create("a", TemplateConfig("B {x}!")), store.delete("a")):
            with pytest.raises(HeadstartError, match="No space left") as caught:
                await change
            assert caught.value.status == 500
        assert len(store.versions("a")) == 1
        assert recognised(templates, "B 1!") is None
        assert (tmp_path / "t.json").read_bytes() == before

    asyncio.run(scenario())
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_the_configuration_keeps_its_names(tmp_path: Path) -> None:
    async def scenario() -> None:
        templates = registry()
        store = TemplateStore(None, templates)
        for change in (store.create("fixed", TemplateConfig("Mine {x}.")), store.delete("fixed")):
            with pytest.raises(ConflictError, match="configuration"):
                await change
        await store.create("loose", TemplateConfig("You are fixed at {when}."))
        assert recognised(templates, "You are fixed at noon.") == ("fixed", 0)  # of equals the configuration's

    asyncio.run(scenario())


def test_a_template_that_the_configuration_took_over_is_hidden_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    async def scenario() -> None:
        await TemplateStore(path, TemplateRegistry({}, normalize=True)).create("fixed", TemplateConfig("Old {x}."))
        templates = registry()
        store = TemplateStore(path, templates)
        assert store.names() == []
        assert recognised(templates, "Old 1.") is None
        await store.create("another", TemplateConfig("Other {x}."))
        assert TemplateStore(path, TemplateRegistry({}, normalize=True)).names() == ["another", "fixed"]

    asyncio.run(scenario())


def test_versions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_store, "MAX_VERSIONS", 2)

    async def scenario() -> None:
        store = TemplateStore(None, registry())
        for name in "ab":
            await store.create(name, TemplateConfig("T {x}!"))
        with pytest.raises(ConflictError, match="2 versions"):
            await store.create("a", TemplateConfig("U {x}!"))
        await store.delete("b")
        await store.create("a", TemplateConfig("U {x}!"))

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", "unregistered", OTHER, "a b", "a@1", "a/b", "é", "x" * 65, ".x", "-", "a\n"])
def test_a_name_that_could_not_be_said_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(TemplateStore(None, registry()).create(name, TemplateConfig("T {x}!")))
    assert caught.value.param == "name"


def test_a_malformed_text_is_the_callers_fault_and_named() -> None:
    with pytest.raises(InvalidRequestError, match="unmatched") as caught:
        asyncio.run(TemplateStore(None, registry()).create("t", TemplateConfig("T {x!")))
    assert caught.value.param == "system"


def test_what_is_not_there_is_not_found() -> None:
    async def scenario() -> None:
        store = TemplateStore(None, registry())
        await store.create("a", TemplateConfig("A {x}!"))
        for name, version in (("b", None), ("a", 2)):
            with pytest.raises(TemplateNotFoundError):
                await store.delete(name, version)
        assert len(store.versions("a")) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 2, "templates": {}}', b'{"format": 1}', b"\xff"])
def test_a_file_that_is_none_of_ours_is_refused_at_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="templates_file"):
        TemplateStore(path, registry())
    assert path.read_bytes() == content


def test_a_missing_folder_is_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder"):
        TemplateStore(tmp_path / "no" / "t.json", registry())


def test_what_a_killed_gateway_left_half_written_is_cleared_away_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    asyncio.run(TemplateStore(path, registry()).create("a", TemplateConfig("A {x}!")))
    for name in (".t.json.a1b2_c3d", ".t.json.bak", ".t.json.toolong12", ".u.json.a1b2_c3d", "t.json.a1b2_c3d"):
        (tmp_path / name).write_text("{")
    assert TemplateStore(path, registry()).names() == ["a"]
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == [".t.json.bak", ".t.json.toolong12", ".u.json.a1b2_c3d", "t.json", "t.json.a1b2_c3d"]
