"""From the words of a pin to the tokens that its requests have in common.

Nothing is guessed about chat templates, moved fields or tokenizers: two requests that share nothing but what the pin
says walk the road of every request, and the pin is the token ids with which both begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from cache_policy.keys import KEY_BYTES, chain_keys
from engine.wire import EngineInfo
from gateway.canonical.templates import Template
from gateway.config import PinConfig
from gateway.errors import InvalidRequestError
from gateway.plan import Caller
from gateway.request_path import RequestPath
from gateway.schema import ChatMessage, ChatRequest, HeadstartOptions

__all__ = ["Chain", "Prefix", "PrefixReader", "read_keys"]

_PROBES: Final = ("a", "7")
"""Two values of a field, or questions, that begin differently whatever is in front of them."""

_KEY: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")


class Chain(msgspec.Struct, frozen=True):
    """A pin at one replica: the keys of its blocks, first to last.

    ``token_ids`` fill these blocks and ``root`` is the parent of the first key; both are empty for a pin by keys, whose
    tokens nobody knows.
    """

    keys: tuple[bytes, ...]
    token_ids: list[int] = []
    root: bytes = b""


class Prefix(msgspec.Struct, frozen=True):
    """What a pin pins: ``token_ids`` from the start of its prompts, or ``keys`` where it was given by them."""

    token_ids: list[int] = []
    keys: tuple[bytes, ...] = ()


class PrefixReader:
    """Finds the prefixes of pins. Holds no state; ``model`` is the served name, ``tools`` whether it is shown tools."""

    def __init__(self, path: RequestPath, *, model: str, tools: bool) -> None:
        self._path: Final = path
        self._model: Final = model
        self._tools: Final = tools

    def read(self, pin: PinConfig) -> Prefix:
        """The tokens or keys of a pin, whose tenant must be settled.

        Raises:
            InvalidRequestError: there is no such template, or it, documents, tools or keys cannot be pinned; ``param``
                names the place.
        """
        if pin.keys:
            return Prefix(keys=read_keys(pin.keys))
        assert pin.template is not None
        assert pin.tenant is not None
        if pin.tools and not self._tools:
            raise InvalidRequestError("tools: this model's chat template does not show any.", param="tools")
        try:
            template = self._path.templates.named(pin.template)
            if pin.documents and template.config.documents is not None:
                raise InvalidRequestError(
                    f"documents: the application of template {pin.template!r} pastes its documents into messages; "
                    "pin a prompt of it by its keys (POST /v1/explain).",
                    param="documents",
                )
            caller = Caller(pin.tenant)
            one, other = [self._path.tokenize_chat(body, caller) for body in self._probes(pin, template)]
        except InvalidRequestError as error:
            raise _in_own_words(error) from None
        shared = next((place for place, ids in enumerate(zip(one, other, strict=False)) if ids[0] != ids[1]), len(one))
        return Prefix(one[:shared])

    def chain(self, pin: PinConfig, prefix: Prefix, info: EngineInfo) -> Chain:
        """The prefix at a replica: its full blocks under the keys that the tenant's prompts have there."""
        if prefix.keys:
            return Chain(prefix.keys)
        assert pin.tenant is not None
        root = self._path.root(pin.tenant, info.fingerprint, pin.cache_salt)
        token_ids = prefix.token_ids[: len(prefix.token_ids) // info.block_size * info.block_size]
        return Chain(tuple(chain_keys(root, token_ids, info.block_size)), token_ids, root)

    def _probes(self, pin: PinConfig, template: Template) -> Iterator[ChatRequest]:
        """Requests of the template that agree in what the pin says and differ in all else.

        One of them has a document more, so that what follows the last one that they share differs too.
        """
        slots = (*template.fields, *filter(None, (template.documents_slot,)))
        more = ({"text": "a"},) if template.config.documents is None else ()
        for probe, further in zip(_PROBES, ((), more), strict=True):
            yield ChatRequest(
                model=self._model,
                messages=[ChatMessage("user", probe)],
                documents=[*pin.documents, *further],
                tools=[*pin.tools] or None,
                headstart=HeadstartOptions(template=pin.template, fields=dict.fromkeys(slots, probe)),
            )


def read_keys(given: tuple[str, ...]) -> tuple[bytes, ...]:
    """Block keys out of hex digits. Raises ``InvalidRequestError`` naming the first that is none, or is repeated."""
    places: dict[bytes, int] = {}
    for index, text in enumerate(given):
        place = f"keys[{index}]"
        if not _KEY.fullmatch(text):
            raise InvalidRequestError(f"{place} must have {2 * KEY_BYTES} lower-case hex digits.", param=place)
        first = places.setdefault(bytes.fromhex(text), index)
        if first != index:
            raise InvalidRequestError(f"{place} repeats keys[{first}]: a chain has each key once.", param=place)
    return tuple(places)


def _in_own_words(error: InvalidRequestError) -> InvalidRequestError:
    """A pin has its template where a request has it in ``headstart``."""
    param = error.param and error.param.removeprefix("headstart.")
    return InvalidRequestError(error.message.removeprefix("headstart."), param=param, code=error.code)
