"""The trace recorder writes what ``headstart simulate`` reads, in files of a bounded size, and survives a full disk."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cache_policy.traces import read_trace
from gateway.config import TraceConfig
from gateway.stats import recorder as module
from gateway.stats.recorder import TraceRecorder


def keys(*numbers: int) -> list[bytes]:
    return [(2 * number).to_bytes(8, "little") + b"\0" * 8 for number in numbers]  # the last bit is cut off


def record(recorder: TraceRecorder, *numbers: int, **changes: Any) -> None:
    fields = {"output_length": 7, "block_size": 16, "template": "support", "tenant": "search"} | changes
    recorder.record(keys(*numbers), input_length=16 * len(numbers) + 3, **fields)


def test_a_recording_is_a_trace_without_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorder = TraceRecorder(TraceConfig(folder=str(tmp_path / "made")))
        await recorder.start()
        record(recorder, 2, 4, 6)
        record(recorder, 2, 4, 8)
        await recorder.stop()
        assert recorder.problem is None

    asyncio.run(scenario())
    path = tmp_path / "made" / "trace.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert set(lines[0]) == {
        "timestamp", "input_length", "output_length", "hash_ids", "block_size", "template", "tenant",
    }  # fmt: skip
    trace = read_trace(path)
    assert trace.block_size == 16
    assert trace.lengths == (51, 51)
    assert trace.requests == ((0, 1, 2), (0, 1, 3))


def test_a_restart_goes_on_where_the_last_life_ended(tmp_path: Path) -> None:
    async def life() -> None:
        recorder = TraceRecorder(TraceConfig(folder=str(tmp_path)))
        await recorder.start()
        record(recorder, 2, 4)
        await recorder.stop()

    asyncio.run(life())
    asyncio.run(life())
    assert read_trace(tmp_path / "trace.jsonl").requests == ((0, 1), (0, 1))


def test_full_files_are_packed_and_the_oldest_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorder = TraceRecorder(TraceConfig(folder=str(tmp_path), max_file_mb=1, files=2))
        await recorder.start()
        for part in range(4):
            for number in range(5000):
                record(recorder, *range(part * 100 + number, part * 100 + number + 40))
            await recorder._flush()
        await recorder.stop()

    asyncio.run(scenario())
    packed = sorted(tmp_path.glob("trace-*.jsonl.gz"))
    assert len(packed) == 2
    assert all(len(read_trace(path).requests) == 5000 for path in packed)
    assert (tmp_path / "trace.jsonl").stat().st_size < 2**20
    assert not [*tmp_path.glob("*.partial")]


def test_a_disk_that_fills_up_while_a_file_is_packed_costs_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfileobj", full)

    async def scenario() -> None:
        recorder = TraceRecorder(TraceConfig(folder=str(tmp_path), max_file_mb=1))
        await recorder.start()
        for number in range(5000):
            record(recorder, *range(number, number + 40))
        await recorder.stop()
        assert recorder.problem is not None

    asyncio.run(scenario())
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
    assert len(read_trace(tmp_path / "trace.jsonl").requests) == 5000


def test_a_full_disk_stops_the_recorder_and_nothing_else(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "trace.jsonl").symlink_to("/dev/full")

    async def scenario() -> None:
        recorder = TraceRecorder(TraceConfig(folder=str(tmp_path)))
        await recorder.start()
        record(recorder, 2, 4)
        await recorder._flush()
        assert recorder.problem is not None
        assert "No space left on device" in recorder.problem
        record(recorder, 2, 4)
        assert recorder._lines == []
        await recorder.stop()

    asyncio.run(scenario())


def test_a_folder_that_cannot_be_made_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def scenario() -> None:
        recorder = TraceRecorder(TraceConfig(folder=str(tmp_path / "file" / "below")))
        await recorder.start()
        assert recorder.problem is not None
        record(recorder, 2)
        await recorder.stop()

    asyncio.run(scenario())


def test_what_the_disk_cannot_take_is_dropped_and_never_piles_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_LINES", 3)

    async def scenario() -> None:
        recorder = TraceRecorder(TraceConfig(folder=str(tmp_path)))
        await recorder.start()
        for _ in range(5):
            record(recorder, 2)
        assert len(recorder._lines) == 3
        await recorder.stop()

    asyncio.run(scenario())
    assert len(read_trace(tmp_path / "trace.jsonl", 16).requests) == 3
