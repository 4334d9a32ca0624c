"""Which beginnings of prompts were asked for before, as they came and with one difference after another taken away.

A prompt is compared on several levels. On the first two it is what it is, in its own namespace and in any other. On
each further one, in its own, one more difference no longer counts: the spelling of system texts, the order of tools,
the values of fields, and at last the order of documents. The first level on which a part was there before is the reason
why its tokens are not cached: had that difference not been, they would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from gateway.attribution.part import Part

__all__ = ["Cause", "PartHistory", "Verdict"]

Cause = Literal[
    "never_seen",
    "evicted",
    "other_replica",
    "volatile",
    "document_order",
    "tool_order",
    "text_form",
    "namespace",
    "block_rounding",
    "below_minimum",
    "bypass",
]


class Verdict(msgspec.Struct, frozen=True):
    """Why the tokens of one part are not cached, if they are not.

    ``witness`` is the number of an earlier request that was the same as far as ``depth`` parts, apart from differences
    that the causes before this one explain; None when there was none.
    """

    cause: Cause
    depth: int
    witness: int | None


_Level = Literal["evicted", "namespace", "text_form", "tool_order", "volatile", "document_order"]
_LEVELS: Final[tuple[_Level, ...]] = get_args(_Level)
_MOSTLY_THE_FIRST: Final[frozenset[_Level]] = frozenset({"namespace", "text_form", "volatile"})
_DOCUMENT: Final = 0x9E3779B97F4A7C15  # keeps the digests of single documents apart from those of beginnings


class PartHistory:
    """What was asked for, as 64-bit digests with the number of the request that asked first.

    Owns them; belongs to one thread. Bounded: the latest ``capacity`` to twice as many digests per level, some 100
    bytes each, six levels. A beginning that is asked for again is kept. Levels on which no prompt has yet differed from
    what it is on the first are that one.
    """

    def __init__(self, capacity: int) -> None:
        self._seen: Final = {level: _Generations(capacity) for level in _LEVELS if level not in _MOSTLY_THE_FIRST}
        self._here: int | None = None  # the first namespace

    def judge(self, namespace: bytes, parts: Sequence[Part], serial: int) -> list[Verdict]:
        """Why each of ``parts`` would be missed, given all prompts before; takes this one in as number ``serial``.

        ``namespace`` is who may share with whom (``cache_policy.keys``).
        """
        here = xxh3_64_intdigest(namespace)
        texts = [_bytes(part.text) for part in parts]
        raw = _chain(texts)
        own = [digest ^ here for digest in raw]
        if self._here is None:
            self._here = here
        # Where the namespace does not count, every prompt is looked up as one of the first namespace.
        anyones = own if here == self._here else [digest ^ self._here for digest in raw]
        chains: dict[_Level, list[int]] = {"evicted": own, "namespace": anyones, "text_form": own}
        spelled = texts
        kinds = [part.kind for part in parts]
        # Most prompts differ on no further level, and on each that they do all that was hashed is hashed again.
        if any(part.spelling is not None for part in parts):
            spelled = [
                text if part.spelling is None or part.kind == "tools" else _bytes(part.spelling)
                for part, text in zip(parts, texts, strict=True)
            ]
            chains["text_form"] = [digest ^ here for digest in _chain(spelled)]
        if "tools" in kinds:  # without tools it is the same with its tools sorted
            spelled = [
                text if part.spelling is None else _bytes(part.spelling)
                for part, text in zip(parts, texts, strict=True)
            ]
            chains["tool_order"] = [digest ^ here for digest in _chain(spelled)]
        fixed = spelled
        chains["volatile"] = chains.get("tool_order") or chains["text_form"]
        if "value" in kinds or any(part.fixed is not None for part in parts):
            fixed = [
                b"\0" if part.kind == "value" else text if part.fixed is None else _bytes(part.fixed)
                for part, text in zip(parts, spelled, strict=True)
            ]
            chains["volatile"] = [digest ^ here for digest in _chain(fixed)]
        self._tell_apart(chains)
        verdicts: list[Verdict | None] = [None] * len(parts)
        depth, witness = 0, None
        first = self._seen["evicted"].known(own, serial)
        for level, chain in chains.items():
            seen = self._seen.get(level)
            known, latest = first if seen is None or level == "evicted" else seen.known(chain, serial)
            if known > depth:
                verdicts[depth:known] = [Verdict(level, depth, witness)] * (known - depth)
            if known > depth or (known == depth and latest is not None):
                depth, witness = known, latest
        self._judge_documents(parts, fixed, chains["volatile"], here, serial, verdicts, depth, witness)
        return [
            # A value that stands where it did not stand before is new, whatever becomes of the text around it.
            Verdict("never_seen", depth, witness)
            if verdict is None or (part.kind == "value" and verdict.cause == "volatile")
            else verdict
            for part, verdict in zip(parts, verdicts, strict=True)
        ]

    def _tell_apart(self, chains: Mapping[_Level, list[int]]) -> None:
        """Give those levels a memory of their own that were the first so far, and with these ``chains`` are not."""
        first = self._seen["evicted"]
        for level in _MOSTLY_THE_FIRST:
            if level not in self._seen and chains[level] is not chains["evicted"]:
                self._seen[level] = first.copy()

    def _judge_documents(
        self,
        parts: Sequence[Part],
        texts: Sequence[bytes],
        chain: list[int],
        here: int,
        serial: int,
        verdicts: list[Verdict | None],
        depth: int,
        witness: int | None,
    ) -> None:
        """Look for each document behind the same beginning at whatever place, and for the rest behind the same set."""
        places = [index for index, part in enumerate(parts) if part.kind == "document"]
        if not places:
            return
        first, last = places[0], places[-1]
        beginning = chain[first - 1] if first else here
        singles = [xxh3_64_intdigest(texts[index], beginning) ^ _DOCUMENT for index in places]
        rest = _chain([str(sorted(singles)).encode(), *texts[last + 1 :]])
        seen = self._seen["document_order"]
        for index, digest in zip(places, singles, strict=True):
            if seen.get_or_put(digest, serial) is not None and verdicts[index] is None:
                verdicts[index] = Verdict("document_order", depth, witness)
        known, _ = seen.known([digest ^ beginning for digest in rest], serial)
        for index in range(last + 1, last + known):
            if verdicts[index] is None:
                verdicts[index] = Verdict("document_order", depth, witness)


class _Generations:
    """A mapping that forgets: entries that were not asked for in the last ``capacity`` to 2 * ``capacity`` others."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def copy(self) -> _Generations:
        """Another one that knows the same: some milliseconds for 200,000 entries."""
        copy = _Generations(self._capacity)
        copy._new, copy._old = self._new.copy(), self._old.copy()
        return copy

    def get_or_put(self, digest: int, serial: int) -> int | None:
        """The number under ``digest``; when there is none, ``serial`` is put there."""
        found = self._new.get(digest)
        if found is not None:
            return found
        found = self._old.get(digest)
        self._new[digest] = serial if found is None else found
        self._forget()
        return found

    def known(self, chain: Sequence[int], serial: int) -> tuple[int, int | None]:
        """How many digests of ``chain`` were there from its start on, and the number under the last of these.

        As ``get_or_put`` does, it puts ``serial`` under those that were not there.
        """
        new, old = self._new, self._old
        count, latest = 0, None
        for digest in chain:
            found = new.get(digest)
            if found is None:
                found = old.get(digest)
                if found is None:
                    break
                new[digest] = found
            count, latest = count + 1, found
        for digest in chain[count:]:
            if digest not in new:
                new[digest] = old.get(digest, serial)
        self._forget()
        return count, latest

    def _forget(self) -> None:
        if len(self._new) > self._capacity:
            self._old, self._new = self._new, {}


def _chain(texts: Sequence[bytes]) -> list[int]:
    """A digest of all up to and including each of ``texts``; where they are cut apart does not matter."""
    state = xxh3_64()
    digests = []
    for text in texts:
        state.update(text)
        digests.append(state.intdigest())
    return digests


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON can carry a lone surrogate
