"""The misses as they are shown: what each cause cost the requests of each template, with an example each.

Texts of prompts stay out of it unless the operator asks for them: of letters and digits only the kind is told, which
is enough to see that a date stood there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.attribution.ages import median_age
from gateway.attribution.causes import CAUSES
from gateway.attribution.history import Cause
from gateway.attribution.live import KeptExample
from gateway.stats.snapshot import Lost, group
from gateway.stats.statistics import Window
from gateway.stats.sums import Missed, Sums

__all__ = ["MissExample", "MissReport", "MissRow", "miss_report"]


class MissExample(msgspec.Struct, frozen=True):
    """A request that missed ``missed`` tokens for this cause at Unix time ``at``.

    It leaves those before it at token ``token``, in a ``part`` of this kind, behind ``text_before``. It goes on with
    ``here``; the nearest earlier prompt of the same namespace goes on with ``there`` (empty where there is none).
    """

    at: float
    missed: int
    part: str
    token: int
    text_before: str
    here: str
    there: str


class MissRow(msgspec.Struct, frozen=True):
    """What one cause cost the requests of one template: ``requests`` missed ``tokens`` tokens for it.

    ``share`` is their part of all missed tokens, ``prefill_s`` what computing them took. ``example`` is the latest
    costly one that this gateway has seen, whatever the window; null when there was none.
    """

    cause: Cause
    template: str
    requests: int
    tokens: int
    share: float
    prefill_s: float
    evicted_ago_p50_s: float | None
    example: MissExample | None


class MissReport(msgspec.Struct, frozen=True):
    """All missed tokens of a window: those of ``causes`` and those of ``rows`` add up to ``missed_tokens``.

    ``since`` is Unix time, ``window_s`` null for everything ever counted. ``enabled`` is whether this gateway
    attributes at all, ``redacted`` whether letters and digits of the examples are blotted out.
    """

    window_s: int | None
    since: float | None
    enabled: bool
    redacted: bool
    prompt_tokens: int
    missed_tokens: int
    causes: dict[Cause, Lost]
    rows: list[MissRow]


def miss_report(
    window: Window,
    minutes: int | None,
    examples: Mapping[tuple[Cause, str], KeptExample] | None,
    decode: Callable[[Sequence[int]], str],
    *,
    show_text: bool,
) -> MissReport:
    """Put a window together; ``examples`` are None where nothing is attributed. Most tokens first."""
    total = Sums.of(window.table.values())
    missed = total.prompt_tokens - total.cached_prompt_tokens
    shown = decode if show_text else lambda ids: blotted(decode(ids))
    rows = []
    for template, sums in group(window.table, "template").items():
        for cause, lost in sums.missed.items():
            kept = None if examples is None else examples.get((cause, template))
            rows.append(
                MissRow(
                    cause,
                    template,
                    lost.requests,
                    lost.tokens,
                    lost.tokens / missed if missed else 0.0,
                    lost.seconds,
                    median_age(sums.evicted_ages) if cause == "evicted" else None,
                    None if kept is None else _example(kept, shown),
                )
            )
    rows.sort(key=lambda row: (-row.tokens, CAUSES.index(row.cause), row.template))
    return MissReport(
        window_s=None if minutes is None else minutes * 60,
        since=window.since,
        enabled=examples is not None,
        redacted=not show_text,
        prompt_tokens=total.prompt_tokens,
        missed_tokens=missed,
        causes={cause: Lost.of(total.missed.get(cause, Missed())) for cause in CAUSES},
        rows=rows,
    )


def _example(kept: KeptExample, decode: Callable[[Sequence[int]], str]) -> MissExample:
    return MissExample(
        kept.at, kept.tokens, kept.part, kept.token, decode(kept.before), decode(kept.here), decode(kept.there)
    )


def blotted(text: str) -> str:
    """``text`` with each letter and digit replaced by one that says only what it is."""
    return "".join(map(_blot, text))


def _blot(character: str) -> str:
    if character.isdigit():
        return "0"
    if character.isalpha():
        return "X" if character.isupper() else "x"
    return character if character.isascii() else "x"
