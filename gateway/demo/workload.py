"""Who asks what and when: a seeded draw, so that both passes send the same requests in the same order."""

from __future__ import annotations

import datetime
import itertools
import random
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.demo.prompts import SYSTEM_PROMPTS
from gateway.demo.questions import QUESTIONS

__all__ = ["MAX_REPEATS", "Ask", "draw_workload"]

MAX_REPEATS: Final = 0.33
"""At most this share of the requests has the very text of an earlier one; beyond it people word it differently."""

_ACCOUNTS: Final = 24
_MEAN_GAP_S: Final = 21.0
_MORNING: Final = datetime.datetime(2025, 3, 10, 8, 57, 12)

_FORMS: Final[tuple[Callable[[str], str], ...]] = (
    lambda text: text,
    lambda text: text.rstrip("?").lower(),
    lambda text: f"Quick question: {text[0].lower()}{text[1:]}",
    lambda text: f"{text} Please show an example.",
    lambda text: f"{text} I need it for a script.",
)
"""How people vary a wording. The first is the wording itself."""


class Ask(msgspec.Struct, frozen=True):
    """One request of the application's users: template, values of the template's fields, the question as typed."""

    template: str
    fields: dict[str, str]
    question: str


def draw_workload(requests: int, seed: int = 3) -> list[Ask]:
    """Draw ``requests`` asks: Zipf popularity of questions, re-wordings, users and times.

    Question k is drawn in proportion to k^-1.1. A longer workload begins with the shorter one of the same seed.
    """
    # Not for secrets: the draw has to be the same everywhere.
    rng = random.Random(seed)  # noqa: S311
    weights = list(itertools.accumulate(rank**-1.1 for rank in range(1, len(QUESTIONS) + 1)))
    accounts = list(itertools.accumulate(1 / rank for rank in range(1, _ACCOUNTS + 1)))
    now = _MORNING
    asked: set[str] = set()
    repeats = 0
    asks: list[Ask] = []
    for number in range(1, requests + 1):
        wordings = rng.choices(QUESTIONS, cum_weights=weights)[0]
        texts = [form(wording) for form in _FORMS for wording in wordings]
        text = rng.choices(texts, weights=[6, 4, *[1] * (len(texts) - 2)])[0]
        if text in asked and repeats + 1 > MAX_REPEATS * number:
            text = next((other for other in texts if other not in asked), text)
        repeats += text in asked
        asked.add(text)
        now += datetime.timedelta(seconds=rng.expovariate(1 / _MEAN_GAP_S))
        fields = {
            "now": now.strftime("%Y-%m-%d %H:%M:%S"),
            "user": f"dev-{rng.choices(range(1, _ACCOUNTS + 1), cum_weights=accounts)[0]:02d}",
            "request_id": f"{rng.getrandbits(32):08x}",
        }
        asks.append(Ask(template=rng.choices(list(SYSTEM_PROMPTS), weights=(6, 3, 2))[0], fields=fields, question=text))
    return asks
