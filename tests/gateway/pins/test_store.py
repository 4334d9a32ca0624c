"""What is kept of pins between two lives of the gateway."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from gateway import local_file
from gateway.config import PinConfig
from gateway.errors import ConfigError, HeadstartError
from gateway.pins.store import Pin, PinStore, pin_id

TEMPLATE = PinConfig("support", ({"id": "x", "text": "ü"},), tenant="default")
KEYS = PinConfig(keys=("00" * 16,))


def made(wish: PinConfig, created: float = 1.0) -> Pin:
    return Pin(pin_id(wish), wish, created, expires=created + 60)


def test_what_was_pinned_is_there_after_a_restart_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    newer, older = made(TEMPLATE, 2.0), made(KEYS, 1.0)

    async def write() -> None:
        store = PinStore(path, (), secret=b"s")
        for pin in (newer, older, made(PinConfig("other", tenant="default"))):
            await store.put(pin)
        await store.remove([pin_id(PinConfig("other", tenant="default"))])

    asyncio.run(write())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert PinStore(path, (), secret=b"s").all() == [older, newer]


def test_keys_mean_nothing_under_another_secret(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"

    async def write() -> None:
        store = PinStore(path, (), secret=b"one")
        await store.put(made(TEMPLATE))
        await store.put(made(KEYS))

    asyncio.run(write())
    assert PinStore(path, (), secret=b"two").all() == [made(TEMPLATE)]
    assert "one" not in path.read_text()


def test_a_change_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        store = PinStore(tmp_path / "pins.json", (), secret=b"s")
        await store.put(made(TEMPLATE))
        monkeypatch.setattr(local_file.os, "fsync", full)
        for change in (store.put(made(KEYS)), store.remove([made(TEMPLATE).id])):
            with pytest.raises(HeadstartError, match="No space left"):
                await change
        assert store.all() == [made(TEMPLATE)]

    asyncio.run(scenario())
    assert [entry.name for entry in tmp_path.iterdir()] == ["pins.json"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 2, "secret": "", "pins": []}', '{"format": 1,'])
def test_a_file_of_something_else_is_told_by_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "pins.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"pins_file: .*pins\.json"):
        PinStore(path, (), secret=b"s")
    with pytest.raises(ConfigError, match="no folder"):
        PinStore(tmp_path / "none" / "pins.json", (), secret=b"s")


def test_the_id_tells_wishes_apart_whatever_the_order_of_their_keys() -> None:
    first = PinConfig("support", ({"id": "x", "text": "t", "a": 1},), tenant="default")
    again = PinConfig("support", ({"a": 1, "text": "t", "id": "x"},), tenant="default")
    others = [
        PinConfig("support", tenant="default"),
        PinConfig("support", tenant="other"),
        PinConfig("support", tenant="default", cache_salt="s"),
        PinConfig("support", tenant="default", tools=({"name": "t"},)),
        KEYS,
    ]
    assert pin_id(first) == pin_id(again)
    assert len({pin_id(wish) for wish in [first, *others]}) == 6
