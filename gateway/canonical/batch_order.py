"""Document orders for a batch: requests that are all known before the first of them is sent."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import msgspec

from gateway.canonical.order import MAX_ORDERED

__all__ = ["BatchRequest", "batch_orders"]


class BatchRequest(msgspec.Struct, frozen=True):
    """A request's documents, as the caller gave them: a key that tells each from others, and its size in tokens.

    Requests share a prefix only with others of their ``group``: the same template and namespace.
    """

    group: Hashable
    documents: tuple[Hashable, ...]
    tokens: tuple[int, ...]


def batch_orders(requests: Sequence[BatchRequest]) -> list[tuple[int, ...]]:
    """For each request, in which order to send its documents, as indexes into them.

    The requests of a group are divided by the document that saves most tokens if all that have it begin with it; they
    are divided further in the same way, and so are the others. What one request has alone comes last, in the caller's
    order, as do documents behind the first ``MAX_ORDERED``. A pure function; its cost grows with the number of
    documents over all requests, times the logarithm of that and the number of documents in a request.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault(request.group, []).append(number)
    led: list[list[int]] = [[] for _ in requests]
    waiting = list(groups.values())
    while waiting:
        waiting += _divide(requests, waiting.pop(), led)
    orders = []
    for request, first in zip(requests, led, strict=True):
        rest = [index for index in range(len(request.documents)) if index not in first]
        orders.append((*first, *rest))
    return orders


def _divide(requests: Sequence[BatchRequest], members: list[int], led: list[list[int]]) -> list[list[int]]:
    """Let ``members``, which begin with the same documents, share further ones; the groups that still may."""
    having: dict[Hashable, dict[int, int]] = {}  # document -> request -> its index there
    size: dict[Hashable, int] = {}
    for member in members:
        request = requests[member]
        for index in range(min(len(request.documents), MAX_ORDERED)):
            if index not in led[member]:
                key = request.documents[index]
                having.setdefault(key, {})[member] = index
                size[key] = request.tokens[index]
    order: Mapping[Hashable, int] = {key: position for position, key in enumerate(having)}
    heap = [(_saved(having[key], size[key]), position, key) for key, position in order.items()]
    heapify(heap)
    groups = []
    while heap:
        saved, position, key = heappop(heap)
        sharing = having[key]
        now = _saved(sharing, size[key])
        if not now:
            continue
        if now != saved:
            heappush(heap, (now, position, key))  # others have taken some of its requests
            continue
        for member, index in sharing.items():
            for other in requests[member].documents[:MAX_ORDERED]:
                if other != key and other in having:
                    having[other].pop(member, None)
            led[member].append(index)
        groups.append([*sharing])
        having[key] = {}
    return groups


def _saved(sharing: Mapping[int, int], tokens: int) -> int:
    """Tokens saved if those who share a document begin with it, negative: the least is the best."""
    return -(len(sharing) - 1) * tokens if sharing else 0
