"""``headstart simulate``: rows, sizes, the page, and what it says about bad input."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from cache_policy.replay import REPLAY_POLICY_NAMES
from gateway.cli.main import run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """120 requests of 64-token blocks: a shared beginning, one of eight middles, an own tail."""
    rng = random.Random(5)
    lines = []
    for serial in range(120):
        middle = rng.randrange(8)
        ids = [1, 2, *range(10 + 3 * middle, 13 + 3 * middle), 100 + serial]
        lines.append(json.dumps({"timestamp": serial, "input_length": 64 * 6 - rng.randrange(64), "hash_ids": ids}))
    path = tmp_path / "some <trace>.jsonl"
    path.write_text("\n".join(lines))
    return path


def rows(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert run(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_there_is_one_row_per_policy_and_size(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows([str(trace), "--sizes", "10%,20,100%"], capsys)
    assert [(row["policy"], row["blocks"]) for row in found] == [
        (name, size) for name in REPLAY_POLICY_NAMES for size in (15, 20, 146)
    ]
    for row in found:
        assert set(row) == {
            "trace",
            "policy",
            "semantics",
            "blocks",
            "token_hit_rate",
            "block_hit_rate",
            "requests",
        }
        assert row["trace"] == str(trace)
        assert row["semantics"] == "prefix"
        assert row["requests"] == 120
        assert 0 < row["block_hit_rate"] < 1
    assert len({row["token_hit_rate"] for row in found if row["blocks"] == 146}) == 1  # nothing was evicted


def test_equal_sizes_are_replayed_once(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["blocks"] for row in rows([str(trace), "--policies", "lru", "--sizes", "0.01%,1,1"], capsys)] == [1]


def test_ids_one_a_line_can_be_replayed_as_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.csv"
    path.write_text("1\n2\n1\n3\n1\n")
    (row,) = rows([str(path), "--semantics", "object", "--policies", "lru", "--sizes", "2"], capsys)
    assert row["block_hit_rate"] == row["token_hit_rate"] == 0.4


def test_the_table_names_policies_and_sizes(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(trace), "--policies", "lru,opt", "--sizes", "20"]) == 0
    out = capsys.readouterr().out
    assert "lru" in out
    assert "20 blocks" in out


def test_the_page_needs_nothing_from_elsewhere(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = trace.with_name("page.html")
    rows([str(trace), "--sizes", "10%,50%", "--html", str(page)], capsys)
    text = page.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    assert "some &lt;trace&gt;.jsonl" in text
    assert "<trace>" not in text
    assert text.count("<polyline") == len(REPLAY_POLICY_NAMES)
    assert 'class="curve ceiling"' in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "lru,mru"], "'mru'; known: lru, .*opt"),
        (["--sizes", "0"], "'0'"),
        (["--sizes", "0%"], "'0%'"),
        (["--sizes", "101%"], "'101%'"),
        (["--sizes", "-4"], "'-4'"),
        (["--sizes", "many"], "'many'"),
        (["--sizes", "nan%"], "'nan%'"),
        (["--trace-block-size", "0"], "trace-block-size"),
        (["--trace-block-size", "16"], "line 1, field hash_ids"),
    ],
)
def test_a_mistake_is_named(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments == ["--trace-block-size", "16"]:
        trace.write_text('{"input_length": 16, "hash_ids": [1, 2]}')
    assert run(["simulate", str(trace), *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, " ".join(captured.err.split()))


def test_a_malformed_line_is_one_clear_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text('{"input_length": 64, "hash_ids": [1]}\n{"input_length": 64, "hash_ids": [true]}\n')
    assert run(["simulate", str(trace)]) == 1
    assert "line 2, field hash_ids[0]" in " ".join(capsys.readouterr().err.split())


def test_a_size_that_holds_everything_is_said_to_never_evict(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(trace), "--sizes", "5000", "--policies", "lru"]) == 0
    assert "never evicts" in " ".join(capsys.readouterr().err.split())
