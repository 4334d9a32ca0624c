"""Document order and replica, chosen together: for each replica its best order, then the cheapest pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from cache_policy.keys import chain_keys, token_bytes
from gateway.canonical.layout import Layout
from gateway.canonical.order import by_id, longest_resident_path
from gateway.config import OrderMode
from gateway.errors import ContextLengthError
from gateway.prompt import PromptRenderer
from gateway.routing.router import Candidate
from gateway.segments import TooManyTokens

__all__ = ["AppliedOrder", "Placement", "encode_text", "place_chat", "place_tokens"]

AppliedOrder = OrderMode | Literal["none"]
RootOf = Callable[[Candidate], bytes]
"""The first parent of the block keys on a replica; it depends on the weights that are loaded there."""


class Placement(msgspec.Struct, frozen=True):
    """A prompt at a replica.

    ``order`` indexes the layout's documents and ``mode`` is how it came about; the first ``led`` of them stand in front
    because the replica holds them. ``cached_tokens`` is what it is believed to hold of the prompt.
    """

    candidate: Candidate
    token_ids: list[int]
    root: bytes
    keys: list[bytes]
    cached_tokens: int
    order: tuple[int, ...] = ()
    mode: AppliedOrder = "none"
    led: int = 0


class _Order(msgspec.Struct, frozen=True):
    indexes: tuple[int, ...]
    mode: AppliedOrder
    led: int = 0


def place_chat(
    layout: Layout,
    mode: OrderMode,
    candidates: Sequence[Candidate],
    root_of: RootOf,
    renderer: PromptRenderer,
    *,
    use_cache: bool,
) -> Placement:
    """Choose order and replica of a laid out conversation.

    Raises:
        ContextLengthError: the prompt leaves no room for output on any candidate.
        InvalidRequestError: the chat template refuses the messages.
    """
    limit = max(candidate.info.max_model_len for candidate in candidates)
    prompts: dict[tuple[int, ...], list[int]] = {}
    placements = []
    for candidate, order in zip(
        candidates, _orders(layout, mode, candidates, root_of, renderer, use_cache), strict=True
    ):
        token_ids = prompts.get(order.indexes)
        if token_ids is None:
            prompt = renderer.render(layout.arrange([layout.documents[index] for index in order.indexes]), layout.tools)
            try:
                token_ids = renderer.encode_prompt(prompt, limit - 1)
            except TooManyTokens as error:
                raise _too_long(error.at_least, limit, "messages") from None
            prompts[order.indexes] = token_ids
        placements.append(_placed(candidate, token_ids, root_of(candidate), order, use_cache=use_cache))
    return _cheapest(placements)


def encode_text(text: str, candidates: Sequence[Candidate], renderer: PromptRenderer) -> list[int]:
    """The ids of a text prompt. Raises ``ContextLengthError`` early when it is far too long for all candidates."""
    limit = max(candidate.info.max_model_len for candidate in candidates)
    try:
        return renderer.encode(text, limit=limit)
    except TooManyTokens as error:
        raise _too_long(error.at_least, limit, "prompt") from None


def place_tokens(
    token_ids: list[int], candidates: Sequence[Candidate], root_of: RootOf, *, use_cache: bool
) -> Placement:
    """Choose the replica of a prompt that is what it is. Raises ``ContextLengthError`` as ``place_chat``."""
    limit = max(candidate.info.max_model_len for candidate in candidates)
    if len(token_ids) >= limit:
        raise _too_long(len(token_ids), limit, "prompt")
    as_is = _Order((), "none")
    return _cheapest(
        [_placed(candidate, token_ids, root_of(candidate), as_is, use_cache=use_cache) for candidate in candidates]
    )


def _orders(
    layout: Layout,
    mode: OrderMode,
    candidates: Sequence[Candidate],
    root_of: RootOf,
    renderer: PromptRenderer,
    use_cache: bool,
) -> list[_Order]:
    """The order of the documents on each candidate."""
    documents = layout.documents
    given = tuple(range(len(documents)))
    if not documents:
        return [_Order(given, "none")] * len(candidates)
    if mode == "preserve" or (mode == "cache-aware" and not use_cache):
        return [_Order(given, "preserve")] * len(candidates)
    if mode == "cache-aware":
        prompt = renderer.render(layout.arrange(documents), layout.tools)
        tokens = renderer.document_tokens(prompt, [document.block for document in documents])
        if tokens is not None:
            head = token_bytes(tokens.head)
            blocks = [None if ids is None else token_bytes(ids) for ids in tokens.blocks]
            found = [
                longest_resident_path(head, blocks, root_of(candidate), candidate.info.block_size, candidate.resident)
                for candidate in candidates
            ]
            return [_Order(best.order, "cache-aware", best.path) for best in found]
    # Also where this tokenizer gives a document other ids at another place: no path can be followed then.
    return [_Order(by_id(documents), "canonical")] * len(candidates)


def _placed(candidate: Candidate, token_ids: list[int], root: bytes, order: _Order, *, use_cache: bool) -> Placement:
    size = candidate.info.block_size
    keys = chain_keys(root, token_ids, size)
    cached = 0
    if use_cache:
        for key in keys[: (len(token_ids) - 1) // size]:  # the last prompt token is always computed
            if key not in candidate.resident:
                break
            cached += size
    return Placement(candidate, token_ids, root, keys, cached, order.indexes, order.mode, order.led)


def _cheapest(placements: Sequence[Placement]) -> Placement:
    """The placement with the earliest first token; of equal ones that on the less busy replica."""

    def price(placement: Placement) -> tuple[float, int]:
        seconds = placement.candidate.expected_seconds(len(placement.token_ids), placement.cached_tokens)
        return seconds, placement.candidate.in_flight

    return min((placement for placement in placements if _fits(placement)), key=price)


def _fits(placement: Placement) -> bool:
    return len(placement.token_ids) < placement.candidate.info.max_model_len


def _too_long(tokens: int, limit: int, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"The prompt has at least {tokens} tokens; this model takes {limit} for prompt and output together.",
        param=param,
    )
