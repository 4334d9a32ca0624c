"""The servers that are compared: how their users start them, and how they are asked for the same thing.

All serve the same weights on 127.0.0.1 with a KV cache for the same number of tokens; everything else is their default.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.launch import module_environment

__all__ = [
    "KV_TOKENS",
    "Peer",
    "has_transformers_server",
    "has_vllm",
    "headstart",
    "transformers",
    "vllm",
    "vllm_preload",
]

KV_TOKENS: Final = 65_536
_BLOCK: Final = 16
_VLLM_BLOCK: Final = 128  # its default on CPUs
_TRANSFORMERS_PAGE: Final = 256
_ASK_S: Final = 120.0


class Peer(msgspec.Struct, frozen=True):
    """One server: its name in the tables, how it is started, which path tells that it serves, what a request adds."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    base_url: str
    ready: str
    fields: Mapping[str, Any]


_OPENAI_FIELDS: Final = {"ignore_eos": True, "stream_options": {"include_usage": True}}


def headstart(model: Path, dtype: str, port: int) -> Peer:
    """Our own: gateway and engine process, as ``headstart serve`` starts them."""
    command = [sys.executable, "-P", "-c", "from gateway.cli.main import main; main()", "serve"]
    options = ["--model", str(model), "--dtype", dtype, "--kv-blocks", str(KV_TOKENS // _BLOCK), "--port", str(port)]
    return Peer(
        "headstart",
        (*command, *options),
        module_environment(),
        f"http://127.0.0.1:{port}",
        "/ready",
        {"model": model.name, **_OPENAI_FIELDS},
    )


def vllm(python: Path, model: Path, dtype: str, port: int, *, kv_gib: int, preload: str) -> Peer:
    """The CPU build of vLLM in the virtual environment of ``python``, computing on all cores.

    ``kv_gib`` is at least what ``KV_TOKENS`` take, ``preload`` the libraries that its documentation says to load first.
    """
    environment = _foreign_environment() | {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{_cores() - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if preload:
        environment["LD_PRELOAD"] = preload
    command = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", model.name, "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--num-gpu-blocks-override", str(KV_TOKENS // _VLLM_BLOCK), "--enable-prompt-tokens-details"]
    return Peer(
        f"vllm {dtype}",
        tuple(command),
        environment,
        f"http://127.0.0.1:{port}",
        "/health",
        {"model": model.name, **_OPENAI_FIELDS},
    )


def transformers(python: Path, model: Path, dtype: str, port: int, *, max_batch_tokens: int) -> Peer:
    """The server of transformers, with continuous batching.

    It knows no ``ignore_eos``: an end-of-sequence id that no token has does the same.
    """
    command = [str(python), "-P", "-m", "transformers.cli.transformers", "serve", str(model), "--continuous-batching"]
    command += ["--attn-implementation", "sdpa", "--device", "cpu", "--dtype", dtype]
    command += ["--cb-num-blocks", str(KV_TOKENS // _TRANSFORMERS_PAGE), "--cb-max-batch-tokens", str(max_batch_tokens)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    settings = {"do_sample": False, "eos_token_id": -1}
    return Peer(
        "transformers",
        tuple(command),
        _foreign_environment() | {"HF_HUB_OFFLINE": "1"},
        f"http://127.0.0.1:{port}",
        "/health",
        {"model": str(model), "generation_config": json.dumps(settings)},
    )


def has_vllm(python: Path) -> bool:
    """Whether vLLM is installed beside that Python."""
    return _true(python, "importlib.util.find_spec('vllm')")


def has_transformers_server(python: Path) -> bool:
    """Whether transformers and what its server needs are installed beside that Python."""
    return _true(python, "importlib.import_module('transformers.utils.import_utils').is_serve_available()")


def vllm_preload(python: Path) -> str:
    """The system's tcmalloc and Intel's OpenMP of vLLM's environment, as far as they are there."""
    found = []
    for name in ("tcmalloc_minimal", "tcmalloc"):
        if library := ctypes.util.find_library(name):
            found.append(library)
            break
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        found.append(str(openmp))
    return ":".join(found)


def _true(python: Path, expression: str) -> bool:
    program = f"import importlib.util, sys; sys.exit(not {expression})"
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", program],
            env=_foreign_environment(),
            capture_output=True,
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _foreign_environment() -> dict[str, str]:
    """This process's environment without what leads another Python to our packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
