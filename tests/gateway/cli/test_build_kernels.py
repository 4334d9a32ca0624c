"""``headstart build-kernels``: the library lands in the cache, or one line says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.main import run


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    return tmp_path / "cache"


def test_the_library_is_built_once(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A stand-in that counts its calls and leaves what it is asked for with -o.
    script(
        tmp_path / "compiler",
        f'echo call >> {tmp_path}/calls\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done',
    )
    assert run(["build-kernels"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.is_relative_to(cache)
    assert path.read_text() == "built\n"
    calls = (tmp_path / "calls").read_text()
    assert run(["build-kernels"]) == 0
    assert (tmp_path / "calls").read_text() == calls
    assert run(["build-kernels", "--force"]) == 0
    assert len((tmp_path / "calls").read_text()) == 2 * len(calls)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_failed_build_says_what_the_compiler_said(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path / "compiler", "echo 'cc1plus: error: out of coffee' >&2\nexit 3")
    assert run(["build-kernels"]) == 1
    assert "error: out of coffee" in capsys.readouterr().err.replace("\n", " ")
    assert list((cache / "kernels").iterdir()) == []


def test_without_a_compiler_one_line_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run(["build-kernels"]) == 1
    assert "there is no C++ compiler" in capsys.readouterr().err
