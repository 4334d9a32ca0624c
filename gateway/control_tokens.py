"""Control tokens that a chat template wrote, told from text that merely spells them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from gateway.segments import TooManyTokens
from gateway.tokenizer_files import read_json

__all__ = ["ControlTokenGuard"]


class ControlTokenGuard:
    """Tells control tokens that the template wrote from text that merely spells them.

    It keeps a second tokenizer in which control tokens go by secret names. The callers' spellings are wrapped in marks
    before rendering; afterwards unmarked spellings, which only the template can have written, get their secret name and
    the marks vanish. Names and marks are random per process, so that no text can contain them.
    """

    def __init__(self, definition: dict[str, Any], path: Path, template_text: str) -> None:
        """``definition`` is that of the ``tokenizer.json`` at ``path``, with or without its vocabulary."""
        nonce = secrets.token_hex(8)
        self._open, self._close = f"\U000f0000{nonce}<", f">{nonce}\U000f0000"
        self._names = {
            token["content"]: f"\U000f0001{nonce}:{token['id']}\U000f0001"
            for token in definition.get("added_tokens") or ()
            if _is_control(token, template_text)
        }
        spelling = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True))) or "(?!)"
        opening, closing = re.escape(self._open), re.escape(self._close)
        self._spelling: Final = re.compile(spelling)
        openings = {name[:1] for name in self._names}
        self._opening: Final = openings.pop() if len(openings) == 1 else ""  # faster to look for than all of them
        self._swap: Final = re.compile(f"{opening}({spelling}){closing}|{opening}|{closing}|({spelling})")
        self._path: Final = path

    def spelled_in(self, value: Any) -> bool:
        """Whether any string within ``value`` spells a control token."""
        search, opening, waiting = self._spelling.search, self._opening, [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                if opening in item and search(item):
                    return True
            elif isinstance(item, dict):
                waiting += item
                waiting += item.values()
            elif isinstance(item, list):
                waiting += item
        return False

    def refuse_hopeless(self, texts: Iterable[str], limit: int) -> None:
        """Raise ``TooManyTokens`` when ``texts`` spell more than ``limit`` control tokens.

        Each of them takes one token at least, being no word of the vocabulary but as a control token.
        """
        spelled = sum(1 for _ in islice(chain.from_iterable(map(self._spelling.finditer, texts)), limit + 1))
        if spelled > limit:
            raise TooManyTokens(spelled)

    def mark(self, value: Any) -> Any:
        """``value`` with all spellings of control tokens wrapped in marks."""
        if isinstance(value, str):
            return self._spelling.sub(lambda match: f"{self._open}{match.group()}{self._close}", value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list) else value

    def swap(self, rendered: str) -> str:
        """Give the template's control tokens their secret names and take the marks away."""

        def replace(match: re.Match[str]) -> str:
            marked, bare = match.groups()
            return self._names[bare] if bare else marked or ""

        return self._swap.sub(replace, rendered)

    def renamed(self) -> tuple[Tokenizer, dict[str, Any]] | None:
        """The tokenizer that knows control tokens by their secret names only, and its definition.

        None where that cannot be.
        """
        names, definition = self._names, read_json(self._path)
        model = dict(definition["model"])
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): index for token, index in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        added = [
            token | {"content": names.get(token["content"], token["content"])} for token in definition["added_tokens"]
        ]
        renamed = definition | {"model": model, "added_tokens": added, "post_processor": None}
        try:
            tokenizer = Tokenizer.from_str(msgspec.json.encode(renamed).decode())
        except Exception:  # tokenizers raises plain Exception for whatever a definition lacks
            return None
        expected = {token["content"]: token["id"] for token in added}
        if any(tokenizer.token_to_id(name) != index for name, index in expected.items()):
            return None
        return tokenizer, renamed


def _is_control(token: dict[str, Any], template_text: str) -> bool:
    """Added tokens that steer the model. Others (runs of blanks, HTML tags) are text that got an id of its own."""
    content: str = token["content"]
    if not content.strip():
        return False
    return bool(token.get("special")) or content in template_text or (content[:2] == "<|" and content[-2:] == "|>")
