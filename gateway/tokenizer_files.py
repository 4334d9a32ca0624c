"""What the files of a model's folder say of its tokenizer and chat template."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.errors import ConfigError

__all__ = ["load_tokenizer", "read_definition", "read_json", "special_spellings", "template_source"]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file. Raises ``ConfigError`` for anything else."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    return value


def read_definition(path: Path) -> tuple[dict[str, Any], int]:
    """What ``tokenizer.json`` says of a tokenizer besides its vocabulary and merges, and one more than the highest id.

    Those are nearly all of it, and the tokenizer itself has read them.
    """
    fields = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(fields.pop("model"), type=dict[str, msgspec.Raw])
    vocabulary = msgspec.json.decode(model.pop("vocab"))
    model.pop("merges", None)
    definition = {key: msgspec.json.decode(raw) for key, raw in fields.items()}
    definition["model"] = {key: msgspec.json.decode(raw) for key, raw in model.items()}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = [token["id"] for token in definition.get("added_tokens") or ()]
    return definition, 1 + max(chain(ids, added))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, neither cutting nor padding. Raises ``ConfigError``."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{path} cannot be used: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template of a model's folder, from its own file or its tokenizer's ``settings``, or None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def special_spellings(settings: dict[str, Any]) -> dict[str, str]:
    """How the special tokens are spelled that templates name (``bos_token``, …)."""
    spellings: dict[str, str] = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            spellings[key] = content
    return spellings
