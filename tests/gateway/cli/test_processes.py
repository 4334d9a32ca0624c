"""``headstart`` as people start it: a process that serves, says where, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 90.0


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of ``condition``; fails when there is none in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def logged(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """The first log line about ``event``."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("{") and json.loads(line)["event"] == event:
            return json.loads(line)
    raise AssertionError(f"no line about {event!r}:\n{''.join(lines)}")


def descendants(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found |= {int(child)} | descendants(int(child))
    return found


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def chat(api: str, model: str = "tiny") -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "What is cached?"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{api}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_serve_answers_and_ends_in_order(headstart: Any, tiny_model: Path) -> None:
    with headstart.start("serve", "--model", str(tiny_model), "--port", "0", "--kv-blocks", "64") as process:
        where = logged(process, "listening")
        base = where["api"].removesuffix("/v1")
        until(lambda: status(f"{base}/ready") == 200)
        assert chat(where["api"])["usage"]["completion_tokens"] >= 1
        assert status(where["dashboard"]) == 200
        family = descendants(process.pid)
        assert len(family) >= 2  # an engine and a Valkey
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, out) == (0, "")
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def test_serve_ends_with_the_reason_when_no_engine_can_start(headstart: Any, tiny_model: Path) -> None:
    (config,) = tiny_model.glob("config.json")
    broken = tiny_model.parent / "broken"
    broken.mkdir(exist_ok=True)
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "config.json").write_text(config.read_text().replace('"llama"', '"mamba"'))
    run = headstart.run("serve", "--model", str(broken), "--port", "0")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("Error: engine-0 does not serve")
    assert "Traceback" not in run.stderr


def test_a_busy_port_is_one_clear_line(headstart: Any, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        run = headstart.run("serve", "--model", str(tiny_model), "--port", str(port))
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in run.stderr


def test_an_engine_alone_serves_on_its_socket(headstart: Any, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    with headstart.start("engine", f"unix:{path}", "--model", str(tiny_model), "--kv-blocks", "64") as process:
        until(path.exists)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    assert not path.exists()


def test_an_engine_needs_an_address_it_knows(headstart: Any) -> None:
    run = headstart.run("engine", "tcp:localhost:1")
    assert run.returncode == 1
    assert "unix:PATH" in run.stderr


def test_the_demo_prints_its_figures_alone_on_stdout(headstart: Any, tiny_model: Path) -> None:
    run = headstart.run("demo", "--exit", "--json", "--requests", "12", "--model", str(tiny_model))
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    figures = {"requests", "failed", "token_hit_rate", "ttft_p50_ms", "ttft_p95_ms", "prefill_s", "saved_prefill_s"}
    assert set(report) == {"as_is", "canonical", "model"}
    assert set(report["as_is"]) == set(report["canonical"]) == figures
    assert report["model"] == "tiny"
    assert [report[name][key] for name in ("as_is", "canonical") for key in ("requests", "failed")] == [12, 0, 12, 0]
    assert report["as_is"]["token_hit_rate"] < 0.1 < report["canonical"]["token_hit_rate"]
    assert report["canonical"]["saved_prefill_s"] > 0
    assert run.stderr.count("prompt tokens from the cache, first token after") == 3


def test_the_demo_keeps_its_dashboard_up_until_ctrl_c(headstart: Any, tiny_model: Path) -> None:
    with headstart.start("demo", "--json", "--requests", "2", "--model", str(tiny_model)) as process:
        line = next(line for line in process.stderr if "stays up at" in line)
        dashboard = next(word for word in line.split() if word.startswith("http"))
        assert status(dashboard) == 200
        family = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        assert set(json.loads(out)) == {"as_is", "canonical", "model"}
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.popen('touch pwned-marker').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_k3_a_model_whose_chat_template_reaches_for_the_system_is_not_served(
    template: str, headstart: Any, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(model_folder("chatml"), folder)
    (folder / "chat_template.jinja").write_text(template)
    done = headstart.run("serve", "--model", str(folder), "--replica", "http://127.0.0.1:1", "--port", "0")
    assert done.returncode == 1
    assert "sandbox" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.rglob("pwned-marker")]
