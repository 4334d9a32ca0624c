"""The engine process: ``python -m engine.worker`` loads a model and serves it on a socket until told to stop.

What it has to say goes to stderr, never with prompt text. Once it serves, it exits with 0 after SIGTERM, SIGINT or a
``shutdown`` call; when it cannot serve, with 1 and the reason in its last line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tokenizers import Tokenizer

from cache_policy.policy import POLICY_NAMES
from engine.core import EngineCore
from engine.detokenize import IncrementalDetokenizer, vocabulary_digest
from engine.errors import EngineError, KernelError, WorkerError
from engine.memory import (
    GPU_MEMORY_SHARE,
    MAX_AUTO_BLOCKS,
    MEMORY_SHARE,
    PoolShape,
    available_bytes,
    pool_blocks,
)
from engine.models.catalog import check_model_folder, weight_files
from engine.native.build import BackgroundBuild
from engine.parent import die_with_parent
from engine.server import EngineServer, bind_unix_socket
from engine.tcp import LEAST_SECRET_CHARS, bind_tcp_socket, parse_endpoint
from engine.wire import EngineInfo

if TYPE_CHECKING:
    from engine.native.library import Kernels

__all__ = ["main", "serve"]

_EXAMPLE_TOKENS: Final = 1024  # the size of request for which the log tells how many fit

_log: Final = logging.getLogger("engine.worker")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engine process with these command-line arguments; return its exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        if options.parent is not None:
            die_with_parent(options.parent)
        secret = _secret(options)
        steps = ThreadPoolExecutor(1, thread_name_prefix="engine-steps")
        core = steps.submit(_load, options).result()
        with _listening(options) as listener:  # last, so that who can connect is served
            asyncio.run(serve(EngineServer(core, listener, secret=secret, thread=steps)))
    except EngineError as error:
        _log.error("%s", error)
        return 1
    return 0


async def serve(server: EngineServer) -> None:
    """Serve until SIGTERM or SIGINT (or a ``shutdown`` call), then end in order."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.serve()


@contextlib.contextmanager
def _listening(options: argparse.Namespace) -> Iterator[socket.socket]:
    """The socket to serve on, and its end."""
    if options.tcp is None:
        listener = bind_unix_socket(options.socket)
    else:
        listener = bind_tcp_socket(*options.tcp)
        host, port, *_ = listener.getsockname()
        _log.info("listening on %s", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    try:
        yield listener
    finally:
        listener.close()
        if options.tcp is None:
            options.socket.unlink(missing_ok=True)


def _secret(options: argparse.Namespace) -> bytes | None:
    """What gateways must know to be served by TCP; None for a unix socket. Raises ``WorkerError``."""
    if options.tcp is None:
        return None
    secret = os.environ.get(options.secret_env, "")
    if len(secret) < LEAST_SECRET_CHARS:
        found = f"has fewer than {LEAST_SECRET_CHARS} characters" if secret else "is not set"
        raise WorkerError(f"{options.secret_env} {found}: whoever reaches a TCP port must show a shared secret")
    return secret.encode()


def _load(options: argparse.Namespace) -> EngineCore:
    """The engine with its weights in memory, warmed up and timed."""
    check_model_folder(options.model)
    on_cpu = options.device == "cpu"
    building = BackgroundBuild() if options.kernels == "auto" and on_cpu else None
    # Imported late: what is wrong before here is said without waiting for torch.
    from engine.attention.selection import attention_backend, free_device_bytes
    from engine.models.loading import kv_bytes_per_block, read_model_info, resolve_dtype, resolve_kv_dtype
    from engine.runner import ModelRunner

    attention_backend(options.device)  # or the error says what there is instead
    model = read_model_info(options.model)
    pool_dtype = resolve_kv_dtype(options.kv_dtype, resolve_dtype(options.dtype, options.device), options.device)
    shape = PoolShape(
        block_size=options.block_size,
        block_bytes=kv_bytes_per_block(model.full_layers, pool_dtype, options.block_size),
        window_block_bytes=kv_bytes_per_block(model.windowed_layers, pool_dtype, options.block_size),
        window=model.window,
        max_batch_tokens=options.max_batch_tokens,
    )
    weights = sum(path.stat().st_size for path in weight_files(options.model))
    num_blocks = pool_blocks(
        options.kv_blocks,
        available=max(0, (available_bytes() if on_cpu else free_device_bytes(options.device)) - weights),
        shape=shape,
        share=options.memory_share or (MEMORY_SHARE if on_cpu else GPU_MEMORY_SHARE),
        most=MAX_AUTO_BLOCKS if on_cpu else sys.maxsize,
    )
    window_blocks = shape.window_blocks(num_blocks)
    runner = ModelRunner(
        options.model,
        dtype=options.dtype,
        num_blocks=num_blocks,
        window_blocks=window_blocks,
        block_size=options.block_size,
        threads=options.threads,
        kv_dtype=options.kv_dtype,
        kernels=partial(_kernels, building) if building else None,
        device=options.device,
    )
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    info = EngineInfo(
        model=options.served_name,
        root=str(options.model),
        fingerprint=runner.fingerprint,
        boot_id=secrets.token_hex(8),
        max_model_len=min(model.max_positions, num_blocks * options.block_size),
        num_blocks=num_blocks,
        block_size=options.block_size,
        dtype=runner.dtype,
        device=runner.device,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        policy=options.policy,
        max_batch_tokens=options.max_batch_tokens,
        profile=runner.profile(),
        kv_dtype=runner.kv_dtype,
        method=runner.method,
        window=model.window,
        window_blocks=window_blocks,
        vocabulary=vocabulary_digest(tokenizer),
    )
    _log.info("computing with %s, cache in %s", info.method, info.kv_dtype)
    if window_blocks:
        _log.info(
            "%d of %d layers see the last %d tokens only and have %d KV blocks of their own: that saves %d MiB",
            len(model.windowed),
            len(model.layers),
            model.window,
            window_blocks,
            (num_blocks - window_blocks) * shape.window_block_bytes // 2**20,
        )
    _log.info(
        "serving %s (%s, %s): %d KV blocks of %d tokens (%d MiB), room for %d requests of %d tokens at once, "
        "at most %d tokens per request",
        info.model,
        info.dtype,
        info.device,
        num_blocks,
        info.block_size,
        shape.total_bytes(num_blocks) // 2**20,
        shape.requests(num_blocks, _EXAMPLE_TOKENS),
        _EXAMPLE_TOKENS,
        info.max_model_len,
    )
    return EngineCore(
        runner, info, detokenizer=partial(IncrementalDetokenizer, tokenizer), max_running=options.max_running
    )


def _kernels(building: BackgroundBuild) -> Kernels | None:
    """The C++ kernels, unless they could not be built or are not ready yet: nobody waits for them."""
    from engine.native.library import Kernels

    path = building.result()
    if path is None:
        reason = building.error or "they are still being built, and will be used from the next start on"
        _log.info("computing without the C++ kernels: %s", reason)
        return None
    try:
        return Kernels(path)
    except KernelError as error:
        _log.warning("computing without the C++ kernels: %s", error)
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.worker",
        description="Serve one model on a socket. `headstart serve` starts this process by itself.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, help="path of a unix socket; only this user will be able to connect")
    where.add_argument("--tcp", type=_endpoint, metavar="HOST:PORT", help="for gateways on other machines")
    add(
        "--secret-env",
        default="HEADSTART__ENGINE__SECRET",
        metavar="NAME",
        help="environment variable with the secret that gateways must know for --tcp (default: %(default)s)",
    )
    add("--model", type=Path, required=True, help="Hugging Face folder with weights and tokenizer")
    add("--served-name", required=True, help="the model's name for clients")
    add("--device", default="cpu", help="cpu, or cuda or cuda:N for a GPU (default: cpu)")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of weights and KV (default: auto)")
    add(
        "--kv-dtype",
        choices=["auto", "float32", "bfloat16", "int8"],
        default="auto",
        help="of the KV cache; auto: the model's (default)",
    )
    add("--kernels", choices=["auto", "off"], default="auto", help="C++ kernels: where they can be built, or never")
    add("--kv-blocks", type=_count(0), default=0, help="size of the KV pool; 0: by free memory (default)")
    add(
        "--memory-share",
        type=_fraction,
        help="part of the free memory that a pool sized by itself takes "
        f"(default: {MEMORY_SHARE}, on a GPU {GPU_MEMORY_SHARE})",
    )
    add("--block-size", type=_count(1), default=16, help="tokens per block (default: 16)")
    add("--policy", choices=POLICY_NAMES, default=POLICY_NAMES[0], help="who leaves the cache first (default: lru)")
    add("--max-batch-tokens", type=_count(1), default=512, help="tokens computed per step (default: 512)")
    add("--max-running", type=_count(1), default=32, help="requests computed at a time (default: 32)")
    add("--threads", type=_count(0), default=0, help="for arithmetic; 0: torch's choice (default)")
    add("--parent", type=_count(1), metavar="PID", help="be killed when this process, which started it, has ended")
    return parser


def _endpoint(text: str) -> tuple[str, int]:
    try:
        return parse_endpoint(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
