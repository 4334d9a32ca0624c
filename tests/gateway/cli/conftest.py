"""The ``headstart`` command as a process, and a model that is small enough to start in seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.native.build import build_kernels, compiler

COMMAND = [sys.executable, "-c", "from gateway.cli.main import main; main()"]


@pytest.fixture(scope="session")
def tiny_model(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights behind a small ChatML tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(model_folder("chatml"), folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Headstart:
    """Starts ``headstart`` with our packages and nothing of the caller's configuration."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HEADSTART")},
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HEADSTART_CACHE": str(cache),
        }

    def without(self, *packages: str) -> Headstart:
        """The same on a machine where ``packages`` are not installed."""
        folder = self._folder / "absent"
        folder.mkdir()
        for package in packages:
            (folder / f"{package}.py").write_text(f"raise ModuleNotFoundError('no module named {package}')")
        self._environment["PYTHONPATH"] = f"{folder}{os.pathsep}{self._environment['PYTHONPATH']}"
        return self

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """The running process with pipes for its output; killed at the end of the block if it still runs."""
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=timeout)
            return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def command_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands keep models. The kernels in it are the user's: who finds none builds them, for seconds."""
    folder = tmp_path_factory.mktemp("cache")
    if compiler() is not None:
        (folder / "kernels").symlink_to(build_kernels().parent)
    return folder


@pytest.fixture
def headstart(tmp_path: Path, command_cache: Path) -> Headstart:
    return Headstart(tmp_path, command_cache)
