"""The two passes over a log: the prompts as their applications wrote them, and as canonicalization lays them out.

Neither needs the other, so that they can run in processes of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gateway.analysis.batch import Orders, arranged, order_log
from gateway.analysis.cache import SimulatedFleet
from gateway.analysis.examples import ShownPrompt, show
from gateway.analysis.log import BadLine, LoggedRequest, read_bodies
from gateway.attribution.causes import CauseRow, CauseTable, Occurrence, Sighting, attribute
from gateway.attribution.history import PartHistory
from gateway.attribution.memory import TokenMemory
from gateway.attribution.parts import locate, prompt_parts
from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.pipeline import Canonicalizer
from gateway.canonical.registry import TemplateRegistry
from gateway.canonical.templates import UNREGISTERED, FilledTemplate
from gateway.config import DEFAULT_TENANT, CanonicalConfig, TemplateConfig
from gateway.errors import InvalidRequestError
from gateway.plan import Caller
from gateway.prompt import PromptRenderer
from gateway.request_path import RequestPath, WeighedChat
from gateway.routing.placement import Placement
from gateway.schema import HeadstartOptions

__all__ = ["AsIsPass", "CanonicalPass", "Job", "PassResult", "TemplateTally", "learn", "order_batch"]

_CALLER: Final = Caller(DEFAULT_TENANT)
_SECRET: Final = b"offline"
_SALT: Final = 0
_AS_IS: Final = CanonicalConfig(order="preserve", hoist="off", text=False)
_REMEMBERED_TOKENS: Final = 64_000_000
_REMEMBERED_PARTS: Final = 1_000_000


class Job(msgspec.Struct, frozen=True):
    """What to analyze and how. ``folder`` holds tokenizer and chat template; ``sizes`` are blocks, None for no end.

    ``name`` is what the log is called in messages. ``learner`` knows the log already; so do ``orders``, which are made
    for a ``batch``.
    """

    log: Path
    name: str
    folder: Path
    canonical: CanonicalConfig
    templates: dict[str, TemplateConfig]
    sizes: tuple[int | None, ...]
    policy: str
    block_size: int
    batch: bool = False
    learner: TemplateLearner | None = None
    orders: Orders | None = None


def learn(job: Job, progress: Callable[[float], None]) -> TemplateLearner:
    """Read the whole log for templates that nobody declared. The same log gives the same. Raises ``LogError``."""
    learner = TemplateLearner(salt=_SALT)
    templates = TemplateRegistry(job.templates, normalize=job.canonical.text)
    canonicalizer = Canonicalizer(msgspec.structs.replace(job.canonical, hoist="suggest"), templates, learner)
    for _, body in read_bodies(job.log, job.name, progress):
        if isinstance(body, LoggedRequest):
            with suppress(InvalidRequestError):  # told of when it is replayed
                observation = canonicalizer.observation(recognizable(body), _CALLER.tenant)
                if observation is not None:
                    learner.observe(observation.source, observation.text)
    return learner


def order_batch(job: Job, progress: Callable[[float], None]) -> Orders:
    """The order of all documents of a log that is sent as one batch. Raises ``LogError``."""
    templates = TemplateRegistry(job.templates, normalize=job.canonical.text)
    return order_log(job.log, job.name, Canonicalizer(job.canonical, templates, job.learner), progress)


class TemplateTally(msgspec.Struct):
    """Sums over the requests of one template, in tokens. ``hits`` are per cache size, ``anywhere`` those that a cache
    could have had in the best order of documents. Owned by the pass that counts.
    """

    template: str
    fields: tuple[str, ...]
    hits: list[int]
    requests: int = 0
    tokens: int = 0
    anywhere: int = 0


class PassResult(msgspec.Struct, frozen=True):
    """What a pass found: a tally per template, sorted by name, the bad lines in order, and the causes of misses."""

    tallies: tuple[TemplateTally, ...]
    bad_lines: tuple[BadLine, ...]
    causes: tuple[CauseRow, ...] = ()


class _Pass(ABC):
    """What both passes do with a log. Owns the simulated caches and the tallies.

    With ``alike`` prompts are the same for all caches.
    """

    def __init__(
        self, job: Job, canonical: CanonicalConfig, renderer: PromptRenderer | None, *, alike: bool = False
    ) -> None:
        self.job: Final = job
        self.renderer: Final = renderer or PromptRenderer(job.folder, lazy=True)
        self.fleet: Final = SimulatedFleet(job.sizes, job.policy, job.block_size, self.renderer.vocab_size, alike=alike)
        self.path: Final = self.request_path(canonical)
        self.tallies: Final[dict[str, TemplateTally]] = {}

    def request_path(self, canonical: CanonicalConfig) -> RequestPath:
        """The gateway's walk with these defaults, to the simulated caches."""
        return RequestPath(
            model="",
            secret=_SECRET,
            canonical=canonical,
            templates=self.job.templates,
            renderer=self.renderer,
            router=self.fleet,
            learned=self.job.learner,
        )

    def run(self, progress: Callable[[float], None]) -> PassResult:
        """Replay the whole log; ``progress`` gets the fraction that is done. Raises ``LogError``."""
        bad_lines: list[BadLine] = []
        for line, body in read_bodies(self.job.log, self.job.name, progress):
            if isinstance(body, BadLine):
                bad_lines.append(body)
                continue
            try:
                self.take(line, body)
            except InvalidRequestError as error:
                bad_lines.append(BadLine.of(self.job.name, line, error))
        tallies = tuple(self.tallies[name] for name in sorted(self.tallies))
        return PassResult(tallies, tuple(bad_lines), self.causes())

    @abstractmethod
    def take(self, line: int, body: LoggedRequest) -> None:
        """Replay the request of line ``line``. Raises ``InvalidRequestError`` before anything was counted."""

    def causes(self) -> tuple[CauseRow, ...]:
        """Why tokens were missed, as far as this pass looks for it."""
        return ()

    def serve(self, placements: Sequence[Placement], *, bypass: bool) -> list[int]:
        """Ask every cache for its prompt; the tokens each of them had."""
        if bypass:
            return [0] * len(self.fleet.caches)
        size = self.job.block_size
        hits = []
        for index, cache in enumerate(self.fleet.caches):
            own = index < len(placements)
            placement = placements[index if own else 0]
            hits.append(size * cache.request(placement.keys, placement.cached_tokens // size if own else 0))
        return hits

    def count(self, template: str, filled: FilledTemplate | None, tokens: int, hits: Sequence[int]) -> TemplateTally:
        """Add a request to the tally of its template."""
        tally = self.tallies.get(template)
        if tally is None:
            fields = filled.template.fields if filled is not None else ()
            tally = self.tallies[template] = TemplateTally(template, fields, [0] * len(hits))
        tally.requests += 1
        tally.tokens += tokens
        for index, hit in enumerate(hits):
            tally.hits[index] += hit
        return tally


class CanonicalPass(_Pass):
    """The prompts as the gateway would lay them out, ordered for each cache by what it holds."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, job.canonical, None)
        self._seen: set[int] = set()

    def take(self, line: int, body: LoggedRequest) -> None:
        """Replay one request; also count what of it was seen before, wherever it stood."""
        order = self.job.orders.get(line) if self.job.orders is not None else None
        weighed = self.path.weigh_chat(body if order is None else arranged(body, order), _CALLER)
        first = weighed.placements[0]
        hits = self.serve(weighed.placements, bypass=_bypasses(body))
        if weighed.sighting is not None:
            self.path.popularity.observe(weighed.sighting)
        tally = self.count(weighed.canonical.template, weighed.canonical.filled, first.length, hits)
        if not _bypasses(body):
            shown = _shown(weighed, first, None)
            tally.anywhere += self._seen_anywhere(first.root, shown)

    def _seen_anywhere(self, root: bytes, shown: ShownPrompt) -> int:
        """Tokens that a cache could have had if documents were the same wherever they stand.

        Those of documents that some prompt of the namespace had before, and of all else that stood behind the same
        texts and the same set of documents. No prefix cache finds more, in whatever order.
        """
        tokens = start = behind = 0
        documents: list[int] = []
        for part, end in zip(shown.parts, self.renderer.begun_before(shown.prompt, shown.ends), strict=True):
            if part.kind == "document":
                digest = hash((root, part.text))
                documents.append(digest)
            else:
                digest = behind = hash((root, behind, tuple(sorted(documents)), part.kind, part.text))
            if digest in self._seen:
                tokens += end - start
            self._seen.add(digest)
            start = end
        return tokens


class AsIsPass(_Pass):
    """The prompts as they are, and for every missed token the cause, in the smallest of the caches."""

    def __init__(self, job: Job, renderer: PromptRenderer | None = None) -> None:
        """``renderer`` is one for the job's folder, where there is one already."""
        super().__init__(job, _AS_IS, renderer, alike=True)
        # Fields are the cause of misses whether the gateway is to move them or not.
        self._recognition: Final = self.request_path(msgspec.structs.replace(job.canonical, hoist="apply"))
        self._endless: Final = (
            self.fleet.caches[job.sizes.index(None)]
            if None in job.sizes
            else SimulatedFleet((None,), job.policy, job.block_size, self.renderer.vocab_size).caches[0]
        )
        self._served_by: Final = min(
            range(len(job.sizes)), key=lambda index: float("inf") if (size := job.sizes[index]) is None else size
        )
        self._memory: Final = TokenMemory(_REMEMBERED_TOKENS)
        self._history: Final = PartHistory(_REMEMBERED_PARTS)
        self._table: Final = CauseTable()

    def take(self, line: int, body: LoggedRequest) -> None:
        """Replay one request and attribute what it missed."""
        filled, _ = self._recognition.recognize(recognizable(body), _CALLER)
        weighed = self.path.weigh_chat(as_written(body), _CALLER)
        placement, bypass = weighed.placements[0], _bypasses(body)
        size, length = self.job.block_size, placement.length
        template = UNREGISTERED if filled is None else filled.template.name
        shown = _shown(weighed, placement, filled)
        hits = self.serve(weighed.placements, bypass=bypass)
        if bypass:
            remembered = 0
        elif None in self.job.sizes:
            remembered = hits[self.job.sizes.index(None)]
        else:
            remembered = size * self._endless.request(placement.keys)
        self.count(template, filled, length, hits)
        witness, common = None, 0
        verdicts = []
        if not bypass:
            shared = self._memory.remember(placement.root, placement.tokens, line)
            witness, common = shared.serial, shared.tokens
            verdicts = self._history.judge(placement.root, shown.parts, line)
        sighting = Sighting(
            length=length,
            cached=hits[self._served_by],
            remembered=remembered,
            common=common,
            ends=self.renderer.begun_before(shown.prompt, shown.ends) if verdicts else (),
            block_size=size,
            bypass=bypass,
        )
        occurrences = []
        for loss in attribute(sighting, verdicts):
            if loss.token <= common or not verdicts:
                occurrences.append(Occurrence(line, loss, witness, None))
            else:
                verdict = verdicts[loss.part]
                depth = loss.part if loss.cause == "never_seen" else verdict.depth
                occurrences.append(Occurrence(line, loss, verdict.witness, depth))
        self._table.add(template, occurrences)

    def causes(self) -> tuple[CauseRow, ...]:
        """The table of causes, with an example each, for which the few requests it takes are read once more."""
        occurrences = self._table.occurrences()
        wanted = {line for occurrence in occurrences for line in (occurrence.serial, occurrence.witness) if line}
        prompts: dict[int, ShownPrompt] = {}
        for line, body in read_bodies(self.job.log, self.job.name, lambda fraction: None, wanted):
            if isinstance(body, LoggedRequest):
                filled, _ = self._recognition.recognize(recognizable(body), _CALLER)
                weighed = self.path.weigh_chat(as_written(body), _CALLER)
                prompts[line] = _shown(weighed, weighed.placements[0], filled)
        return self._table.rows(lambda occurrence: show(occurrence, prompts, self.renderer))


def as_written(body: LoggedRequest) -> LoggedRequest:
    """The body of an application that knows nothing of us, apart from fields that only we can fill in."""
    options = body.headstart
    if options is None:
        return body
    as_is = HeadstartOptions(
        template=options.template if options.fields is not None else None,
        fields=options.fields,
        order="preserve",
        hoist="off",
        bypass=options.bypass,
    )
    return msgspec.structs.replace(body, headstart=as_is)


def recognizable(body: LoggedRequest) -> LoggedRequest:
    """The body without its own wish of what to move, so that its template is recognised in any case."""
    if body.headstart is None or body.headstart.hoist is None:
        return body
    return msgspec.structs.replace(body, headstart=msgspec.structs.replace(body.headstart, hoist=None))


def _bypasses(body: LoggedRequest) -> bool:
    return body.headstart is not None and body.headstart.bypass


def _shown(weighed: WeighedChat, placement: Placement, filled: FilledTemplate | None) -> ShownPrompt:
    layout, prompt = weighed.canonical.layout, placement.prompt
    assert prompt is not None, "a chat was rendered"
    documents = [layout.documents[index] for index in placement.order]
    parts = prompt_parts(layout, documents, filled, prompt.text)
    return ShownPrompt(prompt, parts, locate(parts, prompt.text))
