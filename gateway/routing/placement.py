"""Document order and replica, chosen together: for each replica its best order, then the cheapest pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Final, Literal

import msgspec

from cache_policy.keys import TOKEN_BYTES, chain_keys, token_bytes, token_list
from gateway.canonical.layout import SEPARATOR, Layout
from gateway.canonical.order import UNLIMITED, OrderLimits, by_id
from gateway.canonical.popularity import Snapshot, ranking
from gateway.canonical.resident import ResidentPath, ResidentPaths
from gateway.config import OrderMode
from gateway.errors import ContextLengthError
from gateway.prompt import DocumentTokens, PromptRenderer, PromptText
from gateway.routing.affinity import owner
from gateway.routing.candidate import Candidate
from gateway.segments import TooManyTokens

__all__ = [
    "AppliedOrder",
    "OrderWish",
    "Placement",
    "cheapest",
    "encode_text",
    "place_tokens",
    "refuse_too_long",
    "weigh_chat",
]

_PRESUMED_SHARE: Final = 0.5
"""So much of a prompt is presumed to be where its conversation belongs: enough to go there, but not to queue for it."""

AppliedOrder = OrderMode | Literal["none"]
RootOf = Callable[[Candidate], bytes]
"""The first parent of the block keys on a replica; it depends on the weights that are loaded there."""


class Placement(msgspec.Struct, frozen=True):
    """A prompt at a replica.

    ``order`` indexes the layout's documents and ``mode`` is how it came about; the first ``led`` of them stand in front
    because the replica holds them. ``cached_tokens`` is what it is believed to hold of the prompt, whose ids are
    ``tokens`` (``cache_policy.keys.token_bytes``). ``prompt`` is a chat's rendered text, None for a prompt that was
    never rendered. ``presumed_tokens`` is what a replica is given credit for in choosing because the conversation
    belongs there, without anybody knowing.
    """

    candidate: Candidate
    tokens: bytes
    root: bytes
    keys: list[bytes]
    cached_tokens: int
    order: tuple[int, ...] = ()
    mode: AppliedOrder = "none"
    led: int = 0
    prompt: PromptText | None = None
    presumed_tokens: int = 0

    @property
    def length(self) -> int:
        """Of the prompt, in tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def token_ids(self) -> list[int]:
        """The prompt's ids, made each time they are asked for."""
        return token_list(self.tokens)

    @property
    def expected_seconds(self) -> float:
        """From now to the first token of this prompt at this replica."""
        return self.candidate.expected_seconds(self.length, max(self.cached_tokens, self.presumed_tokens))

    @property
    def fits(self) -> bool:
        """Whether the prompt leaves room for output."""
        return self.length < self.candidate.info.max_model_len


class OrderWish(msgspec.Struct, frozen=True):
    """How the documents of a request are to be ordered: in which way, within which limits, by which popularity."""

    mode: OrderMode
    limits: OrderLimits = UNLIMITED
    snapshot: Snapshot = Snapshot()


class _Order(msgspec.Struct, frozen=True):
    """``path`` is what was found resident of the prompt in this order."""

    indexes: tuple[int, ...]
    mode: AppliedOrder
    path: ResidentPath = ResidentPath()


def weigh_chat(
    layout: Layout,
    wish: OrderWish,
    candidates: Sequence[Candidate],
    root_of: RootOf,
    renderer: PromptRenderer,
    paths: ResidentPaths,
    *,
    use_cache: bool,
    affinity: bytes = b"",
) -> list[Placement]:
    """A laid out conversation at each candidate, in the order of its documents that is best there.

    ``affinity`` is what stays the same over the turns of a conversation; it decides where there is no index.

    Raises:
        ContextLengthError: the prompt leaves no room for output on any candidate.
        InvalidRequestError: the chat template refuses the messages.
    """
    limit = max(candidate.info.max_model_len for candidate in candidates)
    conversation = _Conversation(layout, renderer, limit)
    orders = _orders(conversation, wish, candidates, root_of, paths, use_cache=use_cache)
    home = _home(affinity, candidates) if use_cache else None
    return [
        _placed(
            candidate,
            conversation.tokens(order.indexes),
            root,
            conversation.keys(order, root, candidate.info.block_size),
            order,
            use_cache=use_cache,
            prompt=conversation.prompt(order.indexes),
            home=home,
        )
        for candidate, root, order in zip(candidates, map(root_of, candidates), orders, strict=True)
    ]


def encode_text(text: str, candidates: Sequence[Candidate], renderer: PromptRenderer) -> list[int]:
    """The ids of a text prompt. Raises ``ContextLengthError`` early when it is far too long for all candidates."""
    limit = max(candidate.info.max_model_len for candidate in candidates)
    try:
        return renderer.encode(text, limit=limit)
    except TooManyTokens as error:
        raise _too_long(error.at_least, limit, "prompt") from None


def refuse_too_long(token_ids: Sequence[int], candidates: Sequence[Candidate]) -> None:
    """Raise ``ContextLengthError`` when so many tokens leave no room for output on any candidate."""
    limit = max(candidate.info.max_model_len for candidate in candidates)
    if len(token_ids) >= limit:
        raise _too_long(len(token_ids), limit, "prompt")


def place_tokens(
    token_ids: list[int],
    candidates: Sequence[Candidate],
    root_of: RootOf,
    *,
    use_cache: bool,
    affinity: bytes = b"",
) -> Placement:
    """Choose the replica of a prompt that is what it is. Raises ``ContextLengthError`` as ``weigh_chat``."""
    refuse_too_long(token_ids, candidates)
    as_is, tokens = _Order((), "none"), token_bytes(token_ids)
    home = _home(affinity, candidates) if use_cache else None
    placements = []
    for candidate in candidates:
        root = root_of(candidate)
        keys = chain_keys(root, tokens, candidate.info.block_size)
        placements.append(_placed(candidate, tokens, root, keys, as_is, use_cache=use_cache, home=home))
    return cheapest(placements)


class _Conversation:
    """One laid out conversation under one decision: each order of its documents is rendered and tokenized once.

    So are its block keys made once for all replicas of the same weights.
    """

    def __init__(self, layout: Layout, renderer: PromptRenderer, limit: int) -> None:
        self.documents: Final = layout.documents
        self._layout = layout
        self._renderer = renderer
        self._limit = limit
        self._prompts: dict[tuple[int, ...], PromptText] = {}
        self._known: DocumentTokens | None = None
        self._tokens: dict[tuple[int, ...], bytes] = {}
        self._keys: dict[tuple[tuple[int, ...], bytes, int], list[bytes]] = {}

    def tokens(self, order: tuple[int, ...]) -> bytes:
        tokens = self._tokens.get(order)
        if tokens is None:
            separator, limit = self._layout.separator, self._limit - 1
            blocks = {index: self.documents[index].block for index in order} if separator is not None else {}
            prompt, known = self.prompt(order), self._known
            with self._length_refused():
                if known is not None:
                    tokens = self._renderer.arranged_tokens(prompt, known, blocks, limit, separator or SEPARATOR)
                if tokens is None:
                    tokens = self._renderer.prompt_tokens(prompt, limit, [*blocks.values()], separator or SEPARATOR)
            self._tokens[order] = tokens
        return tokens

    def keys(self, order: _Order, root: bytes, block_size: int) -> list[bytes]:
        keys = self._keys.get((order.indexes, root, block_size))
        if keys is None:
            tokens, stride = self.tokens(order.indexes), block_size * TOKEN_BYTES
            keys = [*order.path.keys]  # the search has hashed them
            for (other, its_root, its_size), known in self._keys.items():
                if (its_root, its_size) == (root, block_size):  # the same, up to where the two orders part
                    common = _common_blocks(self.tokens(other), tokens, stride)
                    keys = known[:common] if common > len(keys) else keys
                    break
            keys += chain_keys(keys[-1] if keys else root, tokens[len(keys) * stride :], block_size)
            self._keys[order.indexes, root, block_size] = keys
        return keys

    def document_tokens(self) -> DocumentTokens | None:
        given = tuple(range(len(self.documents)))
        blocks = [document.block for document in self.documents]
        separator = self._layout.separator
        if separator is None:
            return None
        with self._length_refused():
            self._known = self._renderer.document_tokens(self.prompt(given), blocks, self._limit - 1, separator)
        return self._known

    @contextmanager
    def _length_refused(self) -> Iterator[None]:
        try:
            yield
        except TooManyTokens as error:
            raise _too_long(error.at_least, self._limit, "messages") from None

    def prompt(self, order: tuple[int, ...]) -> PromptText:
        prompt = self._prompts.get(order)
        if prompt is None:
            messages = self._layout.arrange([self.documents[index] for index in order])
            prompt = self._prompts[order] = self._renderer.render(messages, self._layout.tools, self._limit - 1)
        return prompt


def _common_blocks(one: bytes, other: bytes, stride: int) -> int:
    """How many blocks of ``stride`` bytes both begin with."""
    low, high = 0, min(len(one), len(other)) // stride
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * stride : middle * stride] == other[low * stride : middle * stride]:
            low = middle
        else:
            high = middle - 1
    return low


def _orders(
    conversation: _Conversation,
    wish: OrderWish,
    candidates: Sequence[Candidate],
    root_of: RootOf,
    paths: ResidentPaths,
    *,
    use_cache: bool,
) -> list[_Order]:
    """The order of the documents on each candidate."""
    documents, limits = conversation.documents, wish.limits
    given = tuple(range(len(documents)))
    if not documents:
        return [_Order(given, "none")] * len(candidates)
    if wish.mode == "preserve" or (wish.mode == "cache-aware" and not use_cache):
        return [_Order(given, "preserve")] * len(candidates)
    fingerprints = [document.fingerprint for document in documents]
    if wish.mode == "popularity":
        ranks = sorted(given, key=by_id(documents).__getitem__)
        return [_Order(wish.snapshot.order(fingerprints, limits=limits, ranks=ranks), "popularity")] * len(candidates)
    tokens = conversation.document_tokens() if wish.mode == "cache-aware" else None
    if tokens is None:
        # Also where this tokenizer gives a document other ids at another place: no path can be followed then.
        return [_Order(by_id(documents, limits), "canonical")] * len(candidates)
    asked = wish.snapshot.asked(fingerprints)
    preferred = ranking(asked)
    orders = []
    for candidate in candidates:
        size, root = candidate.info.block_size, root_of(candidate)
        held = candidate.resident
        path = paths.longest(tokens.head, tokens.blocks, root, size, held, limits, preferred)
        order = wish.snapshot.order(fingerprints, path.documents, limits, asked=asked)
        orders.append(_Order(order, "cache-aware", path))
    return orders


def _placed(
    candidate: Candidate,
    tokens: bytes,
    root: bytes,
    keys: list[bytes],
    order: _Order,
    *,
    use_cache: bool,
    prompt: PromptText | None = None,
    home: str | None = None,
) -> Placement:
    size, resident = candidate.info.block_size, candidate.resident
    cached = 0
    if use_cache:
        most = (len(tokens) // TOKEN_BYTES - 1) // size  # the last prompt token is always computed
        # Also the blocks of the path that was found are looked up: its search takes those before a block for held.
        cached = size * len([*takewhile(resident.__contains__, keys[:most])])
    led = len(order.path.documents)
    presumed = int(_PRESUMED_SHARE * len(tokens) // TOKEN_BYTES) if candidate.replica_id == home else 0
    return Placement(candidate, tokens, root, keys, cached, order.indexes, order.mode, led, prompt, presumed)


def _home(affinity: bytes, candidates: Sequence[Candidate]) -> str | None:
    """Where a conversation belongs among the replicas of which nobody knows what they hold."""
    return owner(affinity, [candidate.replica_id for candidate in candidates if not candidate.indexed])


def cheapest(placements: Sequence[Placement]) -> Placement:
    """The placement with the earliest first token; of equal ones that on the less busy replica.

    Replicas that were not drawn take part only with the longest prefix, and only as far as it goes beyond what all of
    them hold: a system prompt that all share is no reason to prefer one.
    """

    def price(placement: Placement) -> tuple[bool, float, int]:
        candidate = placement.candidate
        return not candidate.probe, placement.expected_seconds, candidate.in_flight

    if len(placements) == 1:
        return placements[0]
    fitting = [placement for placement in placements if placement.fits]
    drawn = [placement for placement in fitting if placement.candidate.drawn]
    if len(drawn) < len(fitting):
        shared = min(placement.cached_tokens for placement in fitting)
        longest = max(fitting, key=lambda placement: placement.cached_tokens)
        if not drawn or (longest.cached_tokens > shared and not longest.candidate.drawn):
            drawn.append(longest)
        drawn += [placement for placement in fitting if placement.candidate.probe or placement.presumed_tokens]
    return min(drawn, key=price)


def _too_long(tokens: int, limit: int, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"The prompt has at least {tokens} tokens; this model takes {limit} for prompt and output together.",
        param=param,
    )
