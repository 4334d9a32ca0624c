"""Directories for sockets: private, and swept only when nobody lives in them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.socket_folder import NoSocketFolder, make_socket_folder


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hs") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def _ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_this_user_can_enter(parent: Path) -> None:
    folder = make_socket_folder("test")
    assert folder.parent == parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_socket_folder("test") != folder, "one that is in use is left alone"
    assert folder.is_dir()


def test_what_a_killed_gateway_left_is_swept_unless_somebody_answers(parent: Path) -> None:
    pid = _ended_process()
    dead, alive = parent / f"headstart-test-{pid}-a", parent / f"headstart-test-{pid}-b"
    other, foreign = parent / f"headstart-other-{pid}-a", parent / "headstart-test-mine"
    mine = parent / f"headstart-test-{os.getpid()}-c"
    for folder in (dead, alive, other, foreign, mine):
        folder.mkdir()
        (folder / "log").write_text("x")
    with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as listening:
        gone.bind(str(dead / "1.sock"))
        listening.bind(str(alive / "1.sock"))
        listening.listen()
        make_socket_folder("test")
        assert not dead.exists()
        assert all(folder.exists() for folder in (alive, other, foreign, mine))
    make_socket_folder("test")
    assert not alive.exists()


def test_no_place_with_a_short_path_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(deep))
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) == str(deep))
    with pytest.raises(NoSocketFolder, match="TMPDIR"):
        make_socket_folder("test")
