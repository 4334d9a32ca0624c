"""Learning templates from the texts of a source, and recognising what was made from them.

A text that has the form of a learned template only adds to the evidence for its fields. Any other is aligned with
the candidate it resembles most, whose skeleton shrinks to what both share; a candidate whose skeleton has stopped
shrinking becomes a learned template. Texts of several templates may come in any order.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec
import xxhash

from gateway.canonical.crowding import first_to_leave
from gateway.canonical.learning.evidence import fits_metadata
from gateway.canonical.learning.form import Form, form_id
from gateway.canonical.learning.learned import KeptTemplate, LearnedTemplate
from gateway.canonical.learning.observation import Source
from gateway.canonical.learning.skeleton import GAP, Skeleton, generalize
from gateway.canonical.learning.tokens import MAX_TEXT_CHARS, is_word, split_tokens
from gateway.canonical.templates import FilledTemplate
from gateway.config import HoistMode, TemplateConfig

__all__ = [
    "MAX_AT_ONCE_CHARS",
    "MAX_SOURCES",
    "MAX_TEMPLATES",
    "MAX_WEIGHT",
    "PassedOver",
    "TemplateLearner",
]

MAX_SOURCES: Final = 256
"""Sources kept, half of them at most without a volatile field; of each kind the longest unseen of the tenant that has
most leaves first."""

MAX_TEMPLATES: Final = 16
"""Learned templates of a source, and as many candidates; the longest unseen leaves first."""

MAX_WEIGHT: Final = 500_000
"""Tokens of all skeletons and learned templates, a field counting as 16: some 25 MB when that is reached."""

MAX_AT_ONCE_CHARS: Final = 1024
"""Longest text of no known form that is aligned at once where that can wait: some milliseconds at worst."""

PassedOver = Literal["too_long", "budget", "busy"]
"""Why nothing was learned from a text: it has more than ``MAX_TEXT_CHARS``, its source has had more texts of no known
form examined than its requests pay for, or too many others were waiting."""

MAX_FIELDS: Final = 32
"""A text with more gaps than that is no template."""

_MAX_DECISIONS: Final = 4096
_MIN_TEXTS: Final = 6  # of a candidate before it is learned,
_MIN_STEADY: Final = 2  # the last ones of which have left its skeleton as it was
_MIN_WORDS: Final = 3
_ALIKE: Final = 0.6  # share of words in common
_CORE_WORDS: Final = 8  # of a skeleton, which then count alone,
_CORE_ALIKE: Final = 0.9  # if so many are there
_PHRASE: Final = 6  # words
_SENTENCE: Final = 12  # tokens
_COMMON_PHRASES: Final = 8  # of two prompts with the same sentences
_NEVER_REPEATED: Final = 6  # texts with such sentences in common
_VARIANTS: Final = 3  # learned templates that differ in little and are rather values of one more field
_VARIANT_ALIKE: Final = 0.8
_OFTEN: Final = 64  # requests during which evidence is weighed each time, then after each so many
_CREDIT: Final = 200_000  # characters that a source may have looked at closely in advance,
_REFILL: Final = 200  # and for each further request: some 50 µs


class _Text(msgspec.Struct, frozen=True):
    """A text to be aligned: its tokens, their digests, the words among those, and its phrases.

    A phrase is a digest of a few words in a row. Templates have them in common; documents that an application pasted
    into them, however long, do not.
    """

    tokens: list[str]
    digests: array[int]
    words: frozenset[int]
    phrases: frozenset[int]


class _Candidate:
    """A skeleton in the making: the tokens' digests, the words among them, how many texts, how many without change.

    ``phrases`` are those of its only text, until there is a second one.
    """

    __slots__ = ("digests", "phrases", "steady", "texts", "words")

    def __init__(self, text: _Text) -> None:
        self.digests = text.digests
        self.words = text.words
        self.phrases = text.phrases
        self.texts = 1
        self.steady = 0

    @property
    def weight(self) -> int:
        return len(self.digests) + 2 * len(self.phrases)

    def shrink(self, digests: array[int]) -> None:
        """One text more, and this is what is left."""
        self.texts += 1
        self.steady = self.steady + 1 if digests == self.digests else 0
        self.digests = digests
        self.words &= frozenset(digests)
        self.phrases = frozenset()

    def likeness(self, words: frozenset[int]) -> int:
        """How many words it has in common with a text of these; 0 when the text is of another template.

        Once the words that are values have left the skeleton, all of it has to be there, but not the reverse.
        """
        common = len(self.words & words)
        if common >= _ALIKE * max(len(self.words), len(words)):
            return common
        core = self.texts > 1 and len(self.words) >= _CORE_WORDS
        return common if core and common >= _CORE_ALIKE * len(self.words) else 0


class _Source:
    """What is known of one source. ``learned`` and ``candidates`` are in order of use, the latest last."""

    __slots__ = ("candidates", "credit", "learned", "order")

    def __init__(self) -> None:
        self.learned: OrderedDict[str, LearnedTemplate] = OrderedDict()
        self.candidates: list[_Candidate] = []
        self.order: list[LearnedTemplate] = []
        self.credit = _CREDIT

    @property
    def weight(self) -> int:
        return sum(template.weight for template in self.order) + sum(other.weight for other in self.candidates)

    @property
    def volatile(self) -> bool:
        return any(template.volatile for template in self.order)

    def match(self, text: str) -> tuple[LearnedTemplate, list[str]] | None:
        """The most specific learned template whose form ``text`` has, and the values of its fields."""
        for template in self.order:
            values = template.form.split(text)
            if values is not None:
                return template, values
        return None

    def admit(self, template: LearnedTemplate) -> None:
        """Add a template; of too many the longest unseen leaves, if possible one without a volatile field."""
        self.learned[template.id] = template
        if len(self.learned) > MAX_TEMPLATES:
            others = [id for id in self.learned if id != template.id]
            del self.learned[next((id for id in others if not self.learned[id].volatile), others[0])]
        self.order = sorted(self.learned.values(), key=lambda known: (-known.form.literal_chars, known.id))


class TemplateLearner:
    """Owns everything learned, within ``MAX_SOURCES``, ``MAX_TEMPLATES`` and ``MAX_WEIGHT``.

    One thread at a time may ``observe``; meanwhile another may ask and decide.

    Keeps no value and, until a text's constant parts are known to be constant, no text: digests only, salted by
    ``salt`` (default: at random; given one, the same texts in the same order leave exactly the same state).
    """

    def __init__(self, *, salt: int | None = None) -> None:
        self._salt: Final = secrets.randbits(64) if salt is None else salt
        self._plain: OrderedDict[Source, _Source] = OrderedDict()
        self._volatile: OrderedDict[Source, _Source] = OrderedDict()
        self._decisions: OrderedDict[str, HoistMode] = OrderedDict()
        self._weight = 0
        self.observed = 0
        self.examined = 0
        self.passed_over: Counter[PassedOver] = Counter()
        """Texts that nothing was learned from."""

    @property
    def weight(self) -> int:
        """Tokens held; see ``MAX_WEIGHT``."""
        return self._weight

    @property
    def sources(self) -> int:
        """Sources known."""
        return len(self._plain) + len(self._volatile)

    def templates(self) -> Iterator[tuple[Source, LearnedTemplate]]:
        """Every learned template that has a field to move, with its source."""
        for source, known in list(self._volatile.items()):
            yield from ((source, template) for template in known.order if template.volatile)

    def kept(self) -> tuple[KeptTemplate, ...]:
        """Every learned template that has a field to move, as it outlasts the gateway."""
        return tuple([template.kept(source) for source, template in self.templates()])

    @property
    def decisions(self) -> dict[str, HoistMode]:
        """What the operator wants of templates, by id, the latest last."""
        return dict(self._decisions)

    def restore(self, kept: Iterable[KeptTemplate], decisions: Mapping[str, HoistMode]) -> None:
        """Know again what was kept, before anything is observed."""
        for template in kept:
            known = self._known(template.source)
            before = known.weight
            known.admit(LearnedTemplate.restored(template, self._digest))
            self._weight += known.weight - before
            self._place(template.source, known)
        for id, hoist in decisions.items():
            self.decide(id, hoist)

    def decision(self, id: str) -> HoistMode | None:
        """What the operator wants of the template with this id; None for the default."""
        return self._decisions.get(id)

    def decide(self, id: str, hoist: HoistMode) -> None:
        """Remember what the operator wants of a template. The latest 4,096 decisions are kept."""
        self._decisions[id] = hoist
        self._decisions.move_to_end(id)
        if len(self._decisions) > _MAX_DECISIONS:
            self._decisions.popitem(last=False)

    def recognize(self, source: Source, text: str) -> FilledTemplate | None:
        """The learned template that ``text`` was made from, with the values of its volatile fields."""
        known = self._volatile.get(source)
        found = known.match(text) if known is not None and len(text) <= MAX_TEXT_CHARS else None
        if found is None:
            return None
        template, values = found
        moved = [moves and fits_metadata(value) for moves, value in zip(template.form.moved, values, strict=True)]
        if not any(moved):
            return None
        config = TemplateConfig("", hoist=self._decisions.get(template.id))  # its text differs from request to request
        return template.form.filled(values, moved, name=template.name, config=config, version=template.version)

    def observe(self, source: Source, text: str, later: Callable[[Source, str], None] | None = None) -> None:
        """Learn from the system text of one request.

        Costs some microseconds for a text of a known form; others cost their length, but no more than 50 µs a request
        on average over a source. One with more than ``MAX_AT_ONCE_CHARS`` that is of no known form is left to
        ``later``, if there is one, as if it had not been shown.
        """
        if len(text) > MAX_TEXT_CHARS:
            self.passed_over["too_long"] += 1
            return
        known = self._known(source)
        found = known.match(text)
        affordable = min(_CREDIT, known.credit + _REFILL) >= len(text)
        if later is not None and found is None and affordable and len(text) > MAX_AT_ONCE_CHARS:
            later(source, text)
            return
        self.observed += 1
        known.credit = min(_CREDIT, known.credit + _REFILL)
        changed = False
        if found is not None:
            known.learned.move_to_end(found[0].id)
            changed = self._count(*found)
        elif not affordable:
            self.passed_over["budget"] += 1
        else:
            changed = True
            self.examined += 1
            known.credit -= len(text)
            before = known.weight
            self._examine(source, known, text)
            self._weight += known.weight - before
        if changed:
            self._place(source, known)

    # --- inside ------------------------------------------------------------------------------------

    def _known(self, source: Source) -> _Source:
        for table in (self._volatile, self._plain):
            known = table.get(source)
            if known is not None:
                table.move_to_end(source)
                return known
        known = self._plain[source] = _Source()
        if len(self._plain) > MAX_SOURCES // 2:
            self._weight -= self._plain.pop(first_to_leave(self._plain, lambda _: 1)).weight
        return known

    def _place(self, source: Source, known: _Source) -> None:
        """Keep a source in the table of its kind, and what is held within bounds."""
        before, after = (self._plain, self._volatile) if known.volatile else (self._volatile, self._plain)
        if source in before:
            after[source] = before.pop(source)
        for table in (self._plain, self._volatile):
            while len(table) > MAX_SOURCES // 2:
                self._weight -= table.pop(first_to_leave(table, lambda _: 1)).weight
            while self._weight > MAX_WEIGHT and len(table) > 1:
                self._weight -= table.pop(first_to_leave(table, lambda held: held.weight)).weight

    def _count(self, template: LearnedTemplate, values: Sequence[str]) -> bool:
        """Add one request to the evidence; says whether a field has become volatile, or is no longer."""
        template.requests += 1
        counted = template.requests - template.earlier
        due = counted < _OFTEN or counted % _OFTEN == 0
        changed = False
        for evidence, value in zip(template.evidence, values, strict=True):
            evidence.add(value, self._digest(value))
            changed |= due and evidence.decide()
        before = template.form
        if changed:
            template.form = before.decided(template.evidence)
            template.version += template.form.moved != before.moved
        return template.form.moved != before.moved

    def _examine(self, source: Source, known: _Source, text: str) -> None:
        """Align a text of no known form with the candidate that it resembles most."""
        read = self._read(text)
        tokens, digests = read.tokens, read.digests
        candidate = max(known.candidates, key=lambda other: other.likeness(read.words), default=None)
        if candidate is None or not candidate.likeness(read.words):
            candidate = _never_repeated(known.candidates, read.phrases)
        if candidate is None:
            known.candidates.append(_Candidate(read))
            del known.candidates[:-MAX_TEMPLATES]
            return
        known.candidates.remove(candidate)
        skeleton = generalize(candidate.digests, tokens, digests)
        if skeleton.digests.count(GAP) > MAX_FIELDS:
            skeleton = generalize(candidate.digests, tokens, digests, shortest=_SENTENCE)
        candidate.shrink(skeleton.digests)
        if len(candidate.words) < _MIN_WORDS or skeleton.digests.count(GAP) > MAX_FIELDS:
            return  # what these texts share is no template
        if candidate.texts < _MIN_TEXTS or candidate.steady < _MIN_STEADY:
            known.candidates.append(candidate)
            return
        known.credit += _MIN_TEXTS * len(text)
        variants = [other for other in known.order if _alike(other.words, candidate.words)]
        if len(variants) + 1 >= _VARIANTS:
            skeleton = _without_variants(skeleton, variants, tokens, digests)
        self._learn(source, known, skeleton, tokens)

    def _learn(self, source: Source, known: _Source, skeleton: Skeleton, tokens: Sequence[str]) -> None:
        """Make a learned template of a skeleton, in place of those whose form it covers."""
        form = Form.between(skeleton.literals(tokens))
        words = frozenset(self._digest(token) for token in tokens if is_word(token)) & frozenset(skeleton.digests)
        covered = [(other, fields) for other in known.order if (fields := form.covers(other.form)) is not None]
        for other, _ in covered:
            del known.learned[other.id]
        if not covered:
            id = form_id(source.tenant, source.model, form.literals)
            known.admit(LearnedTemplate(id, form, skeleton.digests, words))
            return
        heir, fields = max(covered, key=lambda pair: pair[0].requests)
        learned = LearnedTemplate(heir.id, form, skeleton.digests, words)
        learned.follow(heir, fields)
        known.admit(learned)

    def _read(self, text: str) -> _Text:
        tokens = split_tokens(text)
        digests = array("Q", [self._digest(token) for token in tokens])
        words = [digest for token, digest in zip(tokens, digests, strict=True) if is_word(token)]
        phrases = frozenset(map(hash, zip(*(words[start:] for start in range(_PHRASE)), strict=False)))
        return _Text(tokens, digests, frozenset(words), phrases)

    def _digest(self, text: str) -> int:
        return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"), self._salt) or 1


def _never_repeated(candidates: Sequence[_Candidate], phrases: frozenset[int]) -> _Candidate | None:
    """The latest of several texts that share whole sentences with this one, and were never made again.

    That is how prompts with documents in them look. Several templates with one preamble look so too, but each of them
    comes again soon.
    """
    alike = [other for other in candidates if len(other.phrases & phrases) >= _COMMON_PHRASES]
    return alike[-1] if len(alike) >= _NEVER_REPEATED else None


def _alike(left: frozenset[int], right: frozenset[int]) -> bool:
    """Whether two learned templates might be one with a field more."""
    return len(left & right) >= _VARIANT_ALIKE * max(len(left), len(right))


def _without_variants(
    skeleton: Skeleton, variants: Sequence[LearnedTemplate], tokens: Sequence[str], text: array[int]
) -> Skeleton:
    """What a skeleton shares with all its ``variants``, unless that falls to pieces."""
    shared = skeleton
    for variant in variants:
        shared = generalize(variant.digests, tokens, shared.masked(text))
    return shared if shared.digests.count(GAP) <= MAX_FIELDS else skeleton
