"""The command line's manners: results on stdout, one clear line for an error, exit code 1."""

from __future__ import annotations

import hashlib
import io
import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from gateway.cli.main import run
from gateway.config import AdminConfig, ApiKey
from gateway.replicas import supervisor

KEY = "a key with blanks inside, é and $"


@pytest.fixture
def stdin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(KEY + "\n"))


@pytest.mark.parametrize(
    "arguments", [[], ["serve"], ["engine"], ["demo"], ["model"], ["model", "pull"], ["hash-key"], ["build-kernels"]]
)
def test_every_command_explains_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nonsense"], ["serve", "--port", "many"], ["model", "pull", "a", "b"]])
def test_a_mistake_on_the_command_line_exits_with_1(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Error" in captured.err


def test_an_error_is_one_line_that_keeps_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--host", "0.0.0.0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Add [keys]" in captured.err


@pytest.mark.usefixtures("stdin_key")
def test_a_key_is_hashed_as_the_gateway_hashes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hash-key"]) == 0
    assert capsys.readouterr().out == hashlib.sha256(KEY.encode()).hexdigest() + "\n"


@pytest.mark.usefixtures("stdin_key")
def test_a_tenants_entry_can_be_pasted_into_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hash-key", "--tenant", "search", "--class", "batch"]) == 0
    entry = tomllib.loads(capsys.readouterr().out)
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    assert msgspec.convert(entry["keys"], dict[str, ApiKey]) == {digest: ApiKey("search", "batch")}


@pytest.mark.usefixtures("stdin_key")
def test_the_admin_entry_can_be_pasted_into_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hash-key", "--admin"]) == 0
    entry = tomllib.loads(capsys.readouterr().out)
    assert msgspec.convert(entry["admin"], AdminConfig).key_sha256 == hashlib.sha256(KEY.encode()).hexdigest()


def test_a_new_key_is_shown_apart_from_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hash-key", "--new", "--tenant", "search"]) == 0
    captured = capsys.readouterr()
    key = captured.err.split()[-1]
    assert key not in captured.out
    assert list(tomllib.loads(captured.out)["keys"]) == [hashlib.sha256(key.encode()).hexdigest()]
    assert run(["hash-key", "--new", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["sha256"] == hashlib.sha256(made["key"].encode()).hexdigest()


@pytest.mark.parametrize("key", ["", " padded "])
def test_no_key_is_an_error(key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(key))
    assert run(["hash-key"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [["--tenant", "two words"], ["--tenant", "a", "--admin"]])
def test_an_owner_that_the_configuration_would_refuse_is_refused(options: list[str]) -> None:
    assert run(["hash-key", "--new", *options]) == 1


def test_the_models_are_listed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "list", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in models if model["default"]] == ["smollm2-135m-instruct"]


def test_an_unknown_model_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "pull", "no-such-model"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "smollm2-135m-instruct" in captured.err


@pytest.mark.parametrize("arguments", [["engine", "unix:nowhere.sock"], ["model", "pull"]])
def test_that_no_engine_can_run_here_is_said_before_its_model_is_fetched(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(supervisor, "_ENGINE_PACKAGES", ("msgspec", "no_such_package"))
    assert run(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Error: A local engine needs no_such_package: pip install 'headstart[engine]'.")
    assert list(tmp_path.iterdir()) == []
