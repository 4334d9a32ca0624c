"""Builds the C++ kernels with the system's compiler, once per source, compiler and CPU, into the user's cache.

There is nothing of torch or Python in them (they get addresses and sizes), so that a build takes seconds and stays good
when either is updated. They are an accelerator only: without a compiler the engine computes with PyTorch alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

from engine.errors import KernelError
from engine.models.catalog import cache_dir

__all__ = ["BackgroundBuild", "build_kernels", "compiler"]

_SOURCES: Final = ("attention.cpp", "forward.cpp", "linear.cpp")
_HEADERS: Final = ("attention.h", "kernels.h", "linear.h", "pointwise.h", "scratch.h", "simd.h")
_FLAGS: Final = ("-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-fopenmp", "-fvisibility=default")
_BUILD_SECONDS: Final = 300
_NICENESS: Final = 10
_MORE_FLAGS: Final = "HEADSTART_KERNEL_FLAGS"


def compiler() -> str | None:
    """The C++ compiler to use: ``$CXX``, else ``g++`` or ``c++`` of the search path; None when there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def build_kernels(*, again: bool = False) -> Path:
    """Build the library for this machine unless it is in the cache, and return its path.

    ``$HEADSTART_KERNEL_FLAGS`` go to the compiler last: ``-march=x86-64-v3`` makes kernels for AVX2 only.

    ``again`` builds it in any case. Any number of processes may build at a time: each moves its own result in place.

    Raises:
        KernelError: there is no compiler, or it failed; the message has its first complaint.
    """
    program = compiler()
    if program is None:
        raise KernelError("there is no C++ compiler: install g++, or name one in CXX")
    target = _target(program)
    if target.is_file() and not again:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            sources = [str(_here() / name) for name in _SOURCES]
            _run([program, *_FLAGS, *_for_this_cpu(), "-c", *sources], folder)
            objects = [Path(name).with_suffix(".o").name for name in _SOURCES]
            # Without -fopenmp: OpenMP is then found in what torch has loaded already. A second copy of it in the
            # process would have threads of its own, and both would wait for work at the same time.
            _run([program, "-shared", "-o", target.name, *objects], folder)
            (Path(folder) / target.name).replace(target)
    except OSError as error:
        raise KernelError(f"the kernels cannot be written to {target.parent}: {error}") from error
    return target


class BackgroundBuild:
    """Builds the library beside whatever the process does. Owns a thread, which ends with the process.

    A start is never held up: the library is used when it is ready in time, else from the next start on.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._build, name="kernel-build", daemon=True)
        self._path: Path | None = None
        self.error: KernelError | None = None
        """Why the build failed, once it has ended."""
        self._thread.start()

    def result(self) -> Path | None:
        """The library; None when it is not ready now, or could not be built."""
        return self._path

    def _build(self) -> None:
        try:
            self._path = build_kernels()
        except KernelError as error:
            self.error = error


def _here() -> Path:
    return Path(__file__).parent


def _run(command: list[str], folder: str) -> None:
    nice = shutil.which("nice")
    prefix = [nice, "-n", str(_NICENESS)] if nice else []
    try:
        done = subprocess.run(  # noqa: S603 - a compiler of this machine
            [*prefix, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{command[0]} took more than {_BUILD_SECONDS} seconds") from error
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise KernelError(f"{command[0]} failed: {complaints[0].strip() if complaints else done.returncode}")


def _target(program: str) -> Path:
    """Where the library lies: one name for each source, compiler and set of CPU features."""
    digest = hashlib.sha256()
    for name in (*_HEADERS, *_SOURCES):
        digest.update((_here() / name).read_bytes())
    binary = Path(program).resolve()
    known = binary.stat()
    digest.update(repr((str(binary), known.st_size, known.st_mtime_ns, _FLAGS, _for_this_cpu(), _cpu())).encode())
    return cache_dir() / "kernels" / f"headstart-{digest.hexdigest()[:20]}.so"


def _for_this_cpu() -> list[str]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [native, *shlex.split(os.environ.get(_MORE_FLAGS, ""))]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{sys.platform} {platform.machine()} {features}"
