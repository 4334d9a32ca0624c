"""From messages to token ids and back: the model's chat template and tokenizer as one object.

Only the template makes control tokens. Where a caller's text spells one (``<|im_end|>``), those characters are encoded
as the ordinary text they are; every other prompt has exactly the ids that Hugging Face's ``apply_chat_template`` gives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from cache_policy.keys import TOKEN_BYTES, token_list
from gateway.canonical.messages import Message
from gateway.chat_template import ChatTemplate
from gateway.control_tokens import ControlTokenGuard
from gateway.document_cuts import DocumentCuts, cut_at_documents
from gateway.errors import ConfigError, InvalidRequestError
from gateway.segments import CutRule, SegmentEncoder, TooManyTokens, cut_rule, refuse_hopeless
from gateway.spelling import TokenSpellings
from gateway.tokenizer_files import load_tokenizer, read_definition, read_json, special_spellings, template_source
from gateway.words import WordEncoder

__all__ = ["DocumentTokens", "PromptRenderer", "PromptText"]

_SEGMENT_CAPACITY: Final = 2_000_000
"""Tokens of repeated text kept tokenized, about 35 MB with their text."""

_PLACES: Final = 256
"""Places at which the documents of a prompt are looked for."""


class PromptText(msgspec.Struct, frozen=True):
    """A rendered prompt. ``guarded``: a caller spelled control tokens, so the template's own are spelled otherwise."""

    text: str
    guarded: bool


class DocumentTokens(msgspec.Struct, frozen=True):
    """Token ids of a prompt up to its documents, and of each document, the same at every place in the prompt.

    As bytes (``cache_policy.keys.token_bytes``). ``blocks`` holds None for a document whose ids depend on what follows
    it (it ends in white space). ``around`` is the text before and behind the documents, ``tail`` the ids of what
    follows the last of them and does not count to it; None where its ids depend on which document that is.
    """

    head: bytes
    blocks: list[bytes | None]
    around: tuple[str, str]
    tail: bytes | None


class PromptRenderer:
    """Renders and tokenizes for one model folder. Owns the memories of tokenized text; belongs to one thread.

    ``vocab_size`` is one more than the highest token id, ``spellings`` how each token is written.
    """

    def __init__(self, folder: Path, *, segment_capacity: int = _SEGMENT_CAPACITY, lazy: bool = False) -> None:
        """Load ``tokenizer.json`` and the chat template of ``folder``; no weights are read.

        ``lazy`` puts off what only prompts need that spell control tokens, some tenths of a second; a program with
        callers that wait had better not.

        Raises:
            ConfigError: a file is missing or cannot be used.
        """
        definition_path = folder / "tokenizer.json"
        if not definition_path.is_file():
            raise ConfigError(f"{definition_path} is missing: a model folder needs its fast tokenizer.")
        self._tokenizer: Final = load_tokenizer(definition_path)
        definition, vocab_size = read_definition(definition_path)
        self.vocab_size: Final = vocab_size
        settings = read_json(folder / "tokenizer_config.json")
        template = template_source(folder, settings)
        self._template: Final = None if template is None else ChatTemplate(template, special_spellings(settings))
        self.spellings: Final = TokenSpellings(self._tokenizer)
        self._rule: Final = cut_rule(definition)
        self._segment_capacity: Final = segment_capacity
        self._by_words = True
        self._segments = self._segment_encoder(self._tokenizer, definition, segment_capacity)
        self._guard: Final = ControlTokenGuard(
            definition, definition_path, self._template.literal_text if self._template else ""
        )
        if not lazy:
            _ = self._guarded_segments

    def apart(self) -> PromptRenderer:
        """A renderer of the same model for another thread: with memories of its own, and every id the same.

        It leaves tokenizing to the library as a whole, which lets other threads run meanwhile.
        """
        other = copy.copy(self)
        other.__dict__.pop("_guarded_segments", None)
        other._by_words = False
        other._segments = other._segment_encoder(self._tokenizer, {}, self._segment_capacity // 4)
        return other

    @cached_property
    def _guarded_segments(self) -> SegmentEncoder | None:
        renamed = self._guard.renamed()
        if renamed is None:
            return None
        return self._segment_encoder(*renamed, self._segment_capacity // 8)

    def _segment_encoder(self, tokenizer: Tokenizer, definition: dict[str, Any], capacity: int) -> SegmentEncoder:
        by_words = self._by_words and WordEncoder.fits(definition)
        words = WordEncoder(tokenizer, definition).encode if by_words else None
        return SegmentEncoder(tokenizer, self._rule, capacity, self.spellings.bytes_of, words)

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self._template is not None and self._template.uses_tools

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), limit: int | None = None
    ) -> PromptText:
        """The text of a chat prompt, ending where the assistant's answer begins.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses these messages.
            TooManyTokens: there are bound to be more than ``limit``, as can be told without rendering.
        """
        template = self._template
        if template is None:
            raise InvalidRequestError("This model has no chat template: use /v1/completions.", param="messages")
        if limit is not None and len(messages) > limit:
            raise TooManyTokens(len(messages))
        turns: list[Any] = [_template_message(message, template.knows_developer) for message in messages]
        shown: list[Any] = list(tools)
        guarded = self._guard.spelled_in(turns) or self._guard.spelled_in(shown)
        if not guarded:
            return PromptText(template.render(turns, tools=shown or None), guarded=False)
        if self._guarded_segments is None:
            raise InvalidRequestError(
                "The messages spell a control token of the model, which its tokenizer cannot read as plain text.",
                param="messages",
            )
        if limit is not None:
            # Templates may leave out what the assistant said (its reasoning), but not what it was told.
            self._guard.refuse_hopeless([turn.content for turn in messages if turn.role != "assistant"], limit)
        rendered = template.render(self._guard.mark(turns), tools=self._guard.mark(shown) or None)
        return PromptText(self._guard.swap(rendered), guarded=True)

    def prompt_tokens(
        self, prompt: PromptText, limit: int | None = None, blocks: Sequence[str] = (), separator: str = "\n\n"
    ) -> bytes:
        """The ids of a rendered prompt, as ``cache_policy.keys.token_bytes``.

        Documents that stand in it as ``blocks``, ``separator`` between, are tokenized once and remembered, also where
        no blank line tells them apart. Raises ``TooManyTokens`` when there are more than ``limit``.
        """
        encoder = self._encoder(prompt)
        cuts = self._cuts(prompt, blocks, separator) if blocks else None
        return encoder.encode(prompt.text, limit, cuts.places if cuts else ())

    def encode_prompt(
        self, prompt: PromptText, limit: int | None = None, blocks: Sequence[str] = (), separator: str = "\n\n"
    ) -> list[int]:
        """``prompt_tokens`` as a list."""
        return token_list(self.prompt_tokens(prompt, limit, blocks, separator))

    def begun_before(self, prompt: PromptText, positions: Sequence[int]) -> list[int]:
        """How many tokens of ``prompt`` begin before each of ``positions``, characters in ascending order."""
        return self._encoder(prompt).begun_before(prompt.text, positions)

    def document_tokens(
        self, prompt: PromptText, blocks: Sequence[str], limit: int | None = None, separator: str = "\n\n"
    ) -> DocumentTokens | None:
        """The ids of each document of ``prompt``, in which ``blocks`` stand one after another, ``separator`` between.

        None when this tokenizer, or what stands before them, gives a document other ids at another place.
        Raises ``TooManyTokens`` as soon as there are more than ``limit``.
        """
        encoder, text = self._encoder(prompt), prompt.text
        start = _position(text, blocks, separator)
        cuts = None if start is None else cut_at_documents(encoder.rule, text, start, blocks, separator)
        if start is None or cuts is None:
            return None

        def encoded(pieces: Sequence[str]) -> bytes:
            return b"".join([encoder.encode_whole(piece, limit) for piece in pieces])

        head, documents = encoded(cuts.head), list[bytes | None]()
        size = len(head)
        for pieces in cuts.documents:
            documents.append(None if pieces is None else encoded(pieces))
            size += len(documents[-1] or b"")
            if limit is not None and size > limit * TOKEN_BYTES:
                raise TooManyTokens(size // TOKEN_BYTES)
        tail = None if cuts.tail is None else encoder.encode(text[cuts.tail :], limit)
        end = start + sum(map(len, blocks)) + len(separator) * (len(blocks) - 1)
        return DocumentTokens(head, documents, (text[:start], text[end:]), tail)

    def arranged_tokens(
        self,
        prompt: PromptText,
        known: DocumentTokens,
        blocks: Mapping[int, str],
        limit: int | None = None,
        separator: str = "\n\n",
    ) -> bytes | None:
        """``prompt_tokens`` of ``prompt``, put together from what is ``known`` of the same documents in another order.

        ``blocks`` are their texts by their index there, in the order in which they stand here. None where that is not
        all that differs, or their ids are not the same at every place. Raises ``TooManyTokens`` as ``prompt_tokens``.
        """
        text, (before, behind) = prompt.text, known.around
        if known.tail is None or text != f"{before}{separator.join(blocks.values())}{behind}":
            return None
        encoder = self._encoder(prompt)
        at = len(before) - (len(separator) if encoder.rule is CutRule.BEFORE_NEWLINES else 0)
        pieces = [(text[:at], known.head)]
        for index, block in blocks.items():
            data, start, at = known.blocks[index], at, at + len(block) + len(separator)
            if data is None:
                return None
            pieces.append((text[start:at], data))
        tokens = encoder.join(text, [*pieces, (text[at:], known.tail)])
        if limit is not None and len(tokens) > limit * TOKEN_BYTES:
            raise TooManyTokens(len(tokens) // TOKEN_BYTES)
        return tokens

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """The ids of a plain text, as the tokenizer itself reads it: control tokens that are spelled out count.

        Raises ``TooManyTokens`` early for a long text that has far more than ``limit``.
        """
        if limit is not None:
            refuse_hopeless(self._tokenizer, text, limit)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, control tokens included. Raises ``InvalidRequestError`` for an unknown id."""
        if any(not 0 <= token < self.vocab_size for token in token_ids):
            raise InvalidRequestError(f"tokens must lie between 0 and {self.vocab_size - 1}.", param="tokens")
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _cuts(self, prompt: PromptText, blocks: Sequence[str], separator: str) -> DocumentCuts | None:
        start = _position(prompt.text, blocks, separator)
        if start is None:
            return None
        return cut_at_documents(self._encoder(prompt).rule, prompt.text, start, blocks, separator)

    def _encoder(self, prompt: PromptText) -> SegmentEncoder:
        if not prompt.guarded:
            return self._segments
        assert self._guarded_segments is not None, "render() makes no guarded prompt without it"
        return self._guarded_segments


def _template_message(message: Message, knows_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    turn: dict[str, Any] = {"role": role, "content": message.content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Chat templates expect a call's arguments as an object; OpenAI's API carries them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except msgspec.DecodeError:
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _position(text: str, blocks: Sequence[str], separator: str) -> int | None:
    """Where ``blocks``, joined by ``separator``, stand in ``text``; the last place if there are several.

    None also where their beginning stands at more than ``_PLACES`` later places: a hostile text is nothing else.
    """
    body = separator.join(blocks)
    opening = body[:64]  # searching for a short text and comparing once is faster than searching for all of it
    at = len(text) - len(body) + 1
    for _ in range(_PLACES):
        at = text.rfind(opening, 0, max(0, at + len(opening) - 1))
        if at < 0 or text.startswith(body, at):
            return None if at < 0 else at
    return None
