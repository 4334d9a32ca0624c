"""The engine as a process: it serves a real model, ends in order, and never outlives its parent."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from cache_policy.keys import token_bytes
from engine.wire import (
    Call,
    EngineInfo,
    Output,
    Reply,
    Sampling,
    StepReport,
    Submit,
    decode_from_engine,
    frame,
    read_frame,
)
from engine.worker import _load, _parser

DEADLINE = 120.0  # starting Python with torch on a busy machine
VOCABULARY = 97


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "engine.sock"


@pytest.fixture
def start(path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts workers; whatever still runs at the end of the test is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def launch(model: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "engine.worker", "--socket", str(path), "--model", str(model)]
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [*command, "--served-name", "tiny", *options], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        processes.append(process)
        return process

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def tiny_llama(tiny_model: Callable[..., tuple[Any, Path]]) -> Path:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    _, folder = tiny_model(config)
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"secret{i}": i for i in range(VOCABULARY)}, unk_token="secret0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


async def connect(path: Path, process: subprocess.Popen[bytes]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        assert process.poll() is None, "the worker has ended"
        try:
            return await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(0.02)
    raise TimeoutError("the worker does not listen")


def test_a_worker_serves_a_model_until_it_is_told_to_stop(
    path: Path, start: Callable[..., subprocess.Popen[bytes]], tiny_llama: Path
) -> None:
    process = start(tiny_llama, "--dtype", "float32", "--kv-blocks", "40", "--threads", "1", "--policy", "fifo")
    prompt = list(range(40))

    async def generate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, id: int) -> list[Output]:
        writer.write(frame(Submit(id, token_bytes(prompt), b"r" * 16, Sampling(max_tokens=6, temperature=0))))
        outputs: list[Output] = []
        while not outputs or outputs[-1].finish_reason is None:
            report = decode_from_engine(await read_frame(reader))
            assert isinstance(report, StepReport)
            outputs += report.outputs
        return outputs

    async def scenario() -> None:
        reader, writer = await connect(path, process)
        info = decode_from_engine(await read_frame(reader))
        assert isinstance(info, EngineInfo)
        assert (info.model, info.root, info.policy) == ("tiny", str(tiny_llama), "fifo")
        assert (info.num_blocks, info.max_model_len, info.vocab_size) == (40, 256, VOCABULARY)
        assert info.profile
        assert info.fingerprint
        assert isinstance(decode_from_engine(await read_frame(reader)), StepReport)
        cold, warm = await generate(reader, writer, 1), await generate(reader, writer, 2)
        assert (cold[0].cached_tokens, warm[0].cached_tokens) == (0, 32)
        assert [output.token_ids for output in cold] == [output.token_ids for output in warm]
        assert len(cold) == 6
        assert "secret" in "".join(output.text for output in cold)
        writer.write(frame(Call(1, "check")))
        assert decode_from_engine(await read_frame(reader)) == Reply(1, {"ok": True})
        process.send_signal(signal.SIGTERM)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))
    _, log = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert not path.exists()
    assert b"40 KV blocks of 16 tokens" in log
    assert b"secret" not in log


def test_the_memory_announced_is_that_of_both_kinds_of_blocks(
    tiny_model: Callable[..., tuple[Any, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Gemma2Config

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    _, folder = tiny_model(Gemma2Config(**sizes, **heads, sliding_window=32, bos_token_id=None, eos_token_id=None))
    add_tokenizer(folder)
    arguments = ["--socket", "unused", "--model", str(folder), "--served-name", "tiny", "--dtype", "float32"]
    arguments += ["--kernels", "off", "--kv-blocks", "1024", "--max-batch-tokens", "64"]
    with caplog.at_level(logging.INFO):
        core = _load(_parser().parse_args(arguments))
    assert core.info.window_blocks == 512
    pool = core._runner._pool  # type: ignore[attr-defined]
    held = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values))
    assert held == 24 * 2**20
    assert "1024 KV blocks of 16 tokens (24 MiB)" in caplog.text
    assert (
        "1 of 2 layers see the last 32 tokens only and have 512 KV blocks of their own: that saves 8 MiB" in caplog.text
    )


def test_a_worker_that_cannot_serve_says_why_in_one_line(
    path: Path, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = start(tmp_path / "absent")
    _, log = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "absent" in log.decode().splitlines()[-1]
    assert b"Traceback" not in log
    assert not path.exists()


def test_a_device_that_is_not_there_is_refused_in_one_line(
    start: Callable[..., subprocess.Popen[bytes]], tiny_llama: Path
) -> None:
    process = start(tiny_llama, "--device", "cuda:99")
    _, log = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert re.search(r"finds no GPU|the last GPU of this machine", log.decode().splitlines()[-1])
    assert b"Traceback" not in log


@pytest.mark.parametrize(
    "options",
    [
        ("--block-size", "0"),
        ("--kv-blocks", "-1"),
        ("--memory-share", "1.5"),
        ("--policy", "clairvoyant"),
        ("--dtype", "int8"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, options: tuple[str, str]
) -> None:
    process = start(tmp_path, *options)
    _, log = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert options[0].encode() in log
