"""Every line of a log is a body or says what is wrong with it."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gateway.analysis.log import BadLine, LogError, LoggedRequest, read_bodies

Writer = Callable[[Iterable[Any]], Path]
GOOD = {"messages": [{"role": "user", "content": "hi"}]}


def read(path: Path) -> list[tuple[int, LoggedRequest | BadLine]]:
    return list(read_bodies(path, "log", lambda fraction: None))


@pytest.mark.parametrize("model", [{}, {"model": "gpt"}, {"model": 7}])
def test_the_model_is_of_no_account(model: dict[str, Any], write_log: Writer) -> None:
    ((line, body),) = read(write_log([GOOD | model]))
    assert line == 1
    assert isinstance(body, LoggedRequest)
    assert body.model == ""


@pytest.mark.parametrize(
    ("line", "field", "reason"),
    [
        ("{", None, "JSON"),
        ("[]", None, "object"),
        ("{}", "messages", "required"),
        ('{"messages": "hi"}', "messages", "array"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", "int"),
        ('{"messages": [], "documents": [7]}', "documents[0]", "object"),
        ('{"messages": [], "headstart": {"ordre": "canonical"}}', "headstart", "ordre"),
        ('{"messages": [], "documents": [{"a": ' + "[" * 10_000, None, "nested"),
    ],
)
def test_a_bad_line_names_place_and_reason(line: str, field: str | None, reason: str, write_log: Writer) -> None:
    rows = read(write_log([GOOD, line, "", GOOD]))
    assert [number for number, _ in rows] == [1, 2, 4]
    bad = rows[1][1]
    assert isinstance(bad, BadLine)
    assert (bad.file, bad.line, bad.field) == ("log", 2, field)
    assert reason in bad.reason
    assert str(bad).startswith("log: line 2")


def test_gzip_is_recognised_by_its_content(write_log: Writer, tmp_path: Path) -> None:
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(write_log([GOOD, GOOD]).read_bytes()))
    assert [line for line, _ in read(packed)] == [1, 2]


def test_a_log_that_breaks_off_is_an_error(write_log: Writer, tmp_path: Path) -> None:
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(write_log([GOOD] * 100).read_bytes())[:-20])
    with pytest.raises(LogError, match="cannot be read"):
        read(packed)
    with pytest.raises(LogError, match="absent"):
        read(tmp_path / "absent")


def test_only_the_lines_that_are_wanted_are_read(write_log: Writer) -> None:
    path = write_log([GOOD, "{", "", GOOD, GOOD])
    assert [line for line, _ in read_bodies(path, "log", lambda fraction: None, {1, 3, 4})] == [1, 4]
