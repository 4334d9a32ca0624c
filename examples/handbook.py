"""What the example applications know: a small handbook, and a search over it that needs no packages.

In a real application this is a vector store or a search engine. What matters here is only that it returns passages in
an order that changes from question to question, as all of them do.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

__all__ = ["QUESTIONS", "Passage", "search"]


@dataclass(frozen=True)
class Passage:
    """One paragraph of the handbook."""

    id: str
    title: str
    text: str


HANDBOOK = [
    Passage(
        "loans-1",
        "How long a loan lasts",
        "A hand tool may be kept for fourteen days, a power tool for seven, and anything with an engine for three. "
        "The day on which a tool is fetched does not count. A loan that ends on a day on which the library is "
        "closed ends on the next day on which it is open, without a fee.",
    ),
    Passage(
        "loans-2",
        "Extending a loan",
        "A loan can be extended twice, each time by its usual length, as long as nobody else has reserved the tool."
        " Extensions are made at the counter, by telephone or on the web page, up to the evening of the last day. A"
        " power tool that has been extended twice must stay on its shelf for two days before the same person takes "
        "it.",
    ),
    Passage(
        "loans-3",
        "Reserving a tool",
        "Any tool that is on loan can be reserved. When it comes back it is kept at the counter for three opening "
        "days and then goes to the next person in line. Nobody can hold more than four reservations at a time. "
        "Engines are reserved for a certain date, not for the next free one.",
    ),
    Passage(
        "fees-1",
        "Late fees",
        "A late hand tool costs fifty cents a day, a late power tool two euros, and a late engine ten. The fee "
        "never exceeds a third of what the tool cost when it was new. Whoever owes more than twenty euros cannot "
        "borrow until the debt is paid, and reservations lapse in the meantime.",
    ),
    Passage(
        "fees-2",
        "Membership and deposits",
        "Membership is thirty euros a year, fifteen for households with low income, and free for schools. A deposit"
        " is taken for engines only: one hundred euros, returned when the engine comes back clean and with a full "
        "tank. Membership begins on the day on which it is paid and is not refunded.",
    ),
    Passage(
        "damage-1",
        "Wear and damage",
        "Blades, bits, discs and sanding paper are used up in the ordinary course of work and need not be replaced."
        " Damage beyond that is reported when the tool is returned; nobody is charged for a fault that is reported,"
        " unless the tool was used for something that its sheet forbids. A fault that is concealed costs the whole "
        "repair.",
    ),
    Passage(
        "damage-2",
        "Lost tools",
        "A tool that is lost or stolen is replaced at its present value, which falls by a tenth each year and never"
        " below a quarter of the price. The library asks for a report to the police before it treats a tool as "
        "stolen. A tool that turns up later may be returned, and what was paid for it is given back.",
    ),
    Passage(
        "safety-1",
        "Saws and grinders",
        "Circular saws, chain saws and angle grinders are lent only to members who have taken the safety hour, "
        "which is held on the first Saturday of each month. Goggles, gloves and ear protection are handed out with "
        "them and come back with them. Guards and brakes must not be taken off for any kind of work.",
    ),
    Passage(
        "safety-2",
        "Ladders and scaffolds",
        "A ladder is checked before each loan and must not be painted, since paint hides cracks. Scaffolds above "
        "two metres are put up by two people who have read the sheet that comes with them. Nothing electrical is "
        "used on an aluminium ladder while it rains or in a room with standing water.",
    ),
    Passage(
        "returns-1",
        "Returning a tool",
        "Tools come back clean, dry and complete, in the case in which they were lent. Engines come back with a "
        "full tank and cold. Whatever has no case is tied up with its parts. After closing time hand tools may be "
        "put into the hatch beside the door; power tools and engines may not.",
    ),
    Passage(
        "hours-1",
        "Opening hours",
        "The counter is open on Tuesday and Thursday from four to eight and on Saturday from nine to two. It is "
        "closed on public holidays and in the last week of the year. Schools and associations can fetch tools on "
        "weekday mornings when they have said so two days ahead.",
    ),
    Passage(
        "workshop-1",
        "The workshop",
        "Members can use the workshop while the counter is open. The bench saw and the lathe need the safety hour. "
        "A place is booked for two hours and lapses after a quarter of an hour. Wood can be left on the rack for a "
        "week with a name on it; paint, glue and oil go home the same day.",
    ),
]

QUESTIONS = [
    "How long can I keep a power tool?",
    "Can I extend the loan of a drill, and how often?",
    "What does a late power tool cost a day?",
    "Can I reserve a tool that somebody else has on loan?",
    "May I return a power tool after closing time?",
    "Who may borrow a chain saw?",
]

_WORD = re.compile(r"[a-z]+")
_PASSAGE_WORDS = [Counter(_WORD.findall(f"{passage.title} {passage.text}".lower())) for passage in HANDBOOK]


def search(question: str, k: int = 4) -> list[Passage]:
    """The ``k`` passages that share the rarest words with the question, best first."""
    words = set(_WORD.findall(question.lower()))

    def score(counts: Counter[str]) -> float:
        shared = words & counts.keys()
        return sum(
            math.log(len(HANDBOOK) / sum(word in other for other in _PASSAGE_WORDS)) * counts[word] for word in shared
        )

    ranked = sorted(zip(map(score, _PASSAGE_WORDS), HANDBOOK, strict=True), key=lambda pair: -pair[0])
    return [passage for _, passage in ranked[:k]]
