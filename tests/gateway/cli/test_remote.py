"""``headstart serve --replica``: in front of servers that come and go, on a machine that need not run a model."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.cli.main import run

from .test_processes import TIMEOUT_S, chat, logged, status, until


class _Handler(BaseHTTPRequestHandler):
    """The smallest server that can answer: no ``/health``, one answer; ``/tokenize`` where it has a folder."""

    protocol_version = "HTTP/1.1"
    root: str

    def do_GET(self) -> None:
        cards = [{"id": "theirs", "root": self.root, "max_model_len": 512}]
        self._answer(
            200 if self.path == "/v1/models" else 404, json.dumps({"data": cards}).encode(), "application/json"
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize" and self.root.startswith("/"):
            tokenizer = Tokenizer.from_file(f"{self.root}/tokenizer.json")
            tokens = tokenizer.encode(body["prompt"], add_special_tokens=False).ids
            self._answer(200, json.dumps({"tokens": tokens}).encode(), "application/json")
        elif self.path == "/v1/chat/completions":
            choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
            self._answer(200, json.dumps({"model": body["model"], "choices": [choice]}).encode(), "application/json")
        else:
            choice = {"index": 0, "text": "hello", "finish_reason": "stop"}
            events = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
            self._answer(200 if self.path == "/v1/completions" else 404, events.encode(), "text/event-stream")

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def server(root: str = "", port: int = 0) -> Iterator[str]:
    handler = type("Handler", (_Handler,), {"root": root})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as listener:
        threading.Thread(target=listener.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()


def ready(base: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"{base}/ready") as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


def test_an_unreachable_replica_leaves_the_gateway_up_and_without_torch(headstart: Any, folder: Path) -> None:
    with server() as url:
        port = int(url.rpartition(":")[2])
    command = ("serve", "--replica", f"{url}/v1", "--model", str(folder), "--port", "0")
    with headstart.without("torch", "transformers").start(*command) as process:
        base = logged(process, "listening")["api"].removesuffix("/v1")
        down = logged(process, "replica down")
        assert url in down["reason"]
        code, body = ready(base)
        assert (code, body["ready"]) == (503, False)
        assert any(words.startswith("replica-") and url in words for words in body["degraded"])
        assert status(f"{base}/health") == 200
        with server(port=port):
            until(lambda: ready(base)[0] == 200)
            assert any("/tokenize" in words for words in ready(base)[1]["degraded"])
            answer = chat(f"{base}/v1", model=folder.name)
            assert answer["choices"][0]["message"]["content"] == "hello"
            assert answer["model"] == "theirs"  # it was passed on as it was
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_the_model_is_the_servers_where_its_folder_is_here(headstart: Any, folder: Path) -> None:
    with server(root=str(folder)) as url, headstart.start("serve", "--replica", url, "--port", "0") as process:
        base = logged(process, "listening")["api"]
        until(lambda: status(f"{base.removesuffix('/v1')}/ready") == 200)
        assert chat(base, model="theirs")["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("root", ["org/model", None])
def test_without_a_folder_the_model_has_to_be_given(headstart: Any, root: str | None) -> None:
    with server(root=root or "") as url:
        pass
    if root is None:
        done = headstart.run("serve", "--replica", url)
    else:
        with server(root=root) as url:
            done = headstart.run("serve", "--replica", url)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "with --model" in done.stderr
    assert url in done.stderr
    assert (root is None) == ("cannot be reached" in done.stderr)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--replica", "localhost:8001"), "http://HOST:PORT"),
        (("--replica", "http://a:1", "--replica", "http://a:1/v1"), "twice"),
    ],
)
def test_a_mistake_is_one_clear_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_a_model_that_is_not_there_is_one_clear_line(headstart: Any) -> None:
    done = headstart.run("serve", "--replica", "http://a:1", "--model", "/nowhere/at/all")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no model" in done.stderr
