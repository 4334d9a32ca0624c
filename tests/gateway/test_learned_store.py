"""Learned templates over a restart: the same fields are moved, and no value was written down."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from gateway import learned_store
from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.learning.observation import Source
from gateway.errors import ConfigError
from gateway.learned_store import LearnedStore
from gateway.local_file import replace_file

SOURCE = Source("acme", "m", 7)
SYSTEM = "You are the help desk bot of Initech.\nToday is {now}. Trace: {trace}. Answer from the documents alone."


def text(number: int) -> str:
    return SYSTEM.format(now=f"2026-03-02 08:{number // 60:02}:{number % 60:02}", trace=f"ab{number * 7919:06x}")


def learned(numbers: range = range(40)) -> TemplateLearner:
    learner = TemplateLearner()
    for number in numbers:
        learner.observe(SOURCE, text(number))
    return learner


def kept(path: Path, learner: TemplateLearner) -> Path:
    async def save() -> None:
        await LearnedStore(path, learner).save()

    asyncio.run(save())
    return path


def restored(path: Path) -> TemplateLearner:
    learner = TemplateLearner()
    LearnedStore(path, learner)
    return learner


def about(learner: TemplateLearner, number: int) -> Any:
    found = learner.recognize(SOURCE, text(number))
    assert found is not None
    template = found.template
    return template.name, template.version, template.literals, template.config.hoist, found.values


def test_what_was_learned_and_decided_is_known_again(tmp_path: Path) -> None:
    learner = learned()
    (before,) = learner.kept()
    learner.decide(before.id, "apply")
    path = kept(tmp_path / "learned.json", learner)
    again = restored(path)
    assert again.kept() == (before,)
    assert again.decision(before.id) == "apply"
    assert again.weight == learner.weight
    assert about(again, 99) == about(learner, 99)
    assert again.recognize(Source("other", "m", 7), text(99)) is None


def test_a_restored_template_goes_on_as_any_other(tmp_path: Path) -> None:
    again = restored(kept(tmp_path / "learned.json", learned()))
    for number in range(40, 1500):
        again.observe(SOURCE, text(number))
        assert about(again, number)[1] == about(again, 40)[1], "its version changes with what is moved only"
    assert again.examined == 0
    constant = text(7)
    for _ in range(3000):
        again.observe(SOURCE, constant)
    assert again.recognize(SOURCE, constant) is None, "what no longer changes is no longer moved"


def test_no_value_is_written_and_the_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = kept(tmp_path / "learned.json", learned())
    written = path.read_text()
    assert "Initech" in written
    for number in range(40):
        for value in (f"08:{number // 60:02}:{number % 60:02}", f"ab{number * 7919:06x}"):
            assert value not in written
    assert path.stat().st_mode & 0o077 == 0


def test_saving_follows_what_changes_and_ends_with_the_last_state(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"

    async def life() -> None:
        learner = TemplateLearner()
        store = LearnedStore(path, learner)
        store.start()
        for number in range(40):
            learner.observe(SOURCE, text(number))
        await store.stop()
        assert len(restored(path).kept()) == 1
        path.unlink()
        await store.save()
        assert not path.exists(), "nothing has changed"

    asyncio.run(life())


def test_what_is_being_written_at_the_end_does_not_come_after_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writing, go = tmp_path / "learned.json", threading.Event(), threading.Event()
    learner = learned()

    def slow_at_first(path: Path, content: msgspec.Struct) -> None:
        if not writing.is_set():
            writing.set()
            assert go.wait(30)
        replace_file(path, content)

    monkeypatch.setattr(learned_store, "replace_file", slow_at_first)
    monkeypatch.setattr(learned_store, "SAVE_INTERVAL_S", 0.0)

    class Threads(ThreadPoolExecutor):
        given = 0

        def submit(self, *args: Any, **options: Any) -> Any:
            self.given += 1
            return super().submit(*args, **options)

    async def life() -> None:
        asyncio.get_running_loop().set_default_executor(threads := Threads(4))
        store = LearnedStore(path, learner)
        store.start()
        await asyncio.to_thread(writing.wait, 30)
        given = threads.given
        learner.observe(SOURCE, text(40))
        stopped = asyncio.create_task(store.stop())
        for _ in range(20):
            await asyncio.sleep(0)
        assert threads.given == given, "two write at once"
        go.set()
        await stopped

    asyncio.run(life())
    assert restored(path).kept() == learner.kept()


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    async def life() -> None:
        store = LearnedStore(None, learned())
        store.start()
        await store.stop()

    asyncio.run(life())
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_cannot_be_written_is_told_and_stops_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()

    async def life() -> None:
        store = LearnedStore(folder / "learned.json", learned())
        folder.rmdir()
        await store.save()

    with capture_logs() as logs:
        asyncio.run(life())
    assert [entry["event"] for entry in logs] == ["learned templates cannot be kept"]


def _template(**changes: Any) -> dict[str, Any]:
    whole = {"id": "a", "version": 1, "source": {"tenant": "t", "model": "m"}, "requests": 1, "literals": ["a", "b"]}
    return whole | {"fields": ["x"], "moved": [True], "moving": [True], "bulky": [False]} | changes


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"format": 2, "templates": [], "decisions": {}}),
        json.dumps({"format": 1, "templates": [_template(fields=[])], "decisions": {}}),
        json.dumps({"format": 1, "templates": [_template(literals=["a"])], "decisions": {}}),
        json.dumps({"format": 1, "templates": [_template()], "decisions": {"a": "always"}}),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="learned_file"):
        restored(path)
    with pytest.raises(ConfigError, match="learned_file"):
        restored(tmp_path / "no folder" / "learned.json")
