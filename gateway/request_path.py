"""The one walk from a parsed body to a routed prompt: canonicalize, render, tokenize, key, choose order and replica.

The API sends what comes out; explaining and offline analysis walk the same road.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final, Protocol

import msgspec

from cache_policy.keys import Namespace, derive_root, token_bytes
from gateway.attribution.part import Part
from gateway.attribution.parts import locate, prompt_parts
from gateway.canonical.layout import Layout
from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.learning.observation import Observation
from gateway.canonical.pipeline import Canonicalizer, CanonicalPrompt
from gateway.canonical.popularity import Popularity, Snapshot
from gateway.canonical.registry import TemplateRegistry
from gateway.canonical.resident import ResidentPaths
from gateway.canonical.sighting import Scope, Sighting
from gateway.canonical.templates import UNREGISTERED, FilledTemplate
from gateway.config import CanonicalConfig, OrderMode, TemplateConfig
from gateway.errors import InvalidRequestError, ModelNotFoundError
from gateway.plan import Anatomy, Arm, Caller, Change, Comparison, OrderDecision, Plan
from gateway.prompt import PromptRenderer
from gateway.routing.candidate import Candidate
from gateway.routing.placement import (
    OrderWish,
    Placement,
    cheapest,
    encode_text,
    place_tokens,
    refuse_too_long,
    weigh_chat,
)
from gateway.schema import ChatRequest, CompletionRequest, SamplingFields
from gateway.tracing import stage

__all__ = ["Fleet", "OrderRule", "RequestPath", "WeighedChat", "order_changes", "single_prompt"]

OrderRule = Callable[[str, OrderMode, ChatRequest, Caller], OrderDecision]
"""Asked by template and the order wanted for a request with several documents; changes nothing."""

_COUNTED: Final = ("popularity", "cache-aware")
"""Orders that follow the popularity of documents."""

_AFFINITY_TOKENS: Final = 256
_PASSED_ON: Final = "text completions are passed on as they are"


class Fleet(Protocol):
    """The replicas that may take a request: the live ones (``gateway.routing.router``), or simulated caches."""

    def candidates(self, avoid: Set[str] = frozenset()) -> list[Candidate]:
        """Those that may take one now, at least one, and none to ``avoid``. Raises ``ReplicaUnavailable`` without."""
        ...


class WeighedChat(msgspec.Struct, frozen=True):
    """A chat request at every candidate, and the one that was chosen.

    ``snapshot`` is the popularity that its order followed, ``sighting`` what is to be counted if the request is sent.
    """

    canonical: CanonicalPrompt
    decision: OrderDecision
    placements: tuple[Placement, ...]
    chosen: Placement
    snapshot: Snapshot
    sighting: Sighting | None


class RequestPath:
    """Composes the stages; owns the popularity of documents and memories of pure functions. Belongs to the event loop.

    ``model`` is the served name that bodies must give, ``secret`` the deployment secret behind the block keys.
    ``templates`` are those of the configuration; more are published to the attribute of the same name. ``learned``
    recognises others; whoever composes the path shows it the observations of plans that were carried out, and
    ``popularity`` their sightings. ``order_rule`` has the last word on the order of documents; without one it is as
    asked.
    """

    def __init__(
        self,
        *,
        model: str,
        secret: bytes,
        canonical: CanonicalConfig,
        templates: Mapping[str, TemplateConfig],
        renderer: PromptRenderer,
        router: Fleet,
        learned: TemplateLearner | None = None,
        order_rule: OrderRule | None = None,
        beside: RequestPath | None = None,
    ) -> None:
        """Compile the templates, or take those of the path ``beside`` which this one stands, and its popularity.

        Such a path may be walked in another thread: it only reads what they share.

        Raises:
            ConfigError: a template is malformed.
        """
        self._model: Final = model
        self._renderer: Final = renderer
        self._router: Final = router
        self._order_rule: Final = order_rule
        self.popularity: Final[Popularity] = beside.popularity if beside else Popularity()
        self.resident_paths: Final = ResidentPaths()
        self.templates: Final[TemplateRegistry] = (
            beside.templates if beside else TemplateRegistry(templates, normalize=canonical.text)
        )
        self._to_compare: Final[Callable[[Layout], list[int]]] = (beside or self)._application_prompt
        self._canonicalizer: Final = Canonicalizer(canonical, self.templates, learned)
        self._derive_root: Final = lru_cache(maxsize=4096)(lambda namespace: derive_root(secret, namespace))

    def plan_chat(self, body: ChatRequest, caller: Caller, avoid: Set[str] = frozenset()) -> Plan:
        """Decide everything about a chat request up to its replica, which is none to ``avoid``.

        Raises:
            InvalidRequestError: the body is at fault; ``ContextLengthError`` when its prompt fits no replica.
            ModelNotFoundError: another model is served here.
            ReplicaUnavailable: no replica is ready.
        """
        self.check_model(body.model)
        weighed = self.weigh_chat(body, caller, avoid)
        canonical, decision, placement = weighed.canonical, weighed.decision, weighed.chosen
        documents = canonical.layout.documents
        return _plan(
            placement,
            caller,
            use_cache=_uses_cache(body),
            template=canonical.template,
            document_ids=tuple(documents[index].id for index in placement.order),
            changes=(*canonical.changes, *order_changes(weighed)),
            note=decision.note or canonical.note,
            arm=decision.arm,
            comparison=self._comparison(canonical.layout, body) if decision.compared and _moved(placement) else None,
            observation=canonical.observation,
            sighting=weighed.sighting,
            anatomy=partial(self._anatomy, canonical, placement),
        )

    def weigh_chat(self, body: ChatRequest, caller: Caller, avoid: Set[str] = frozenset()) -> WeighedChat:
        """All that ``plan_chat`` weighs before it decides, whatever model the body names.

        Raises ``InvalidRequestError`` and ``ReplicaUnavailable`` as ``plan_chat`` does.
        """
        with _nesting_refused():
            with stage("canonicalize"):
                canonical = self._canonicalizer.canonicalize(body, caller.tenant)
            decision = self._decide(canonical, body, caller)
            scope = Scope(caller.tenant, canonical.template, body.cache_salt or "")
            snapshot = self.popularity.snapshot(scope)
            with stage("tokenize and route"):
                placements = weigh_chat(
                    canonical.layout,
                    OrderWish(decision.order, canonical.limits, snapshot),
                    self._router.candidates(avoid),
                    self._root_of(body, caller),
                    self._renderer,
                    self.resident_paths,
                    use_cache=_uses_cache(body),
                    affinity=_affinity(body, canonical.layout),
                )
        documents = canonical.layout.documents
        counted = documents and decision.order in _COUNTED and _uses_cache(body)
        sighting = Sighting(scope, tuple([document.fingerprint for document in documents])) if counted else None
        return WeighedChat(canonical, decision, tuple(placements), cheapest(placements), snapshot, sighting)

    def recognize(self, body: ChatRequest, caller: Caller) -> tuple[FilledTemplate | None, Observation | None]:
        """The template of a chat request with its values, and what is to be learned from it; nothing else is done.

        Raises ``InvalidRequestError`` where its messages or its template are at fault.
        """
        return self._canonicalizer.recognize(body, caller.tenant)

    def plan_completion(self, body: CompletionRequest, caller: Caller, avoid: Set[str] = frozenset()) -> Plan:
        """Decide where a text completion goes; its prompt is left as it is. Raises as ``plan_chat``."""
        self.check_model(body.model)
        prompt = single_prompt(body.prompt)
        candidates = self._router.candidates(avoid)
        if isinstance(prompt, str):
            token_ids = encode_text(prompt, candidates, self._renderer)
        else:
            refuse_too_long(prompt, candidates)  # before its elements are looked at: there may be millions
            token_ids = _checked_ids(prompt, min(candidate.info.vocab_size for candidate in candidates))
        if not token_ids:
            raise InvalidRequestError("prompt is empty.", param="prompt")
        use_cache = _uses_cache(body)
        affinity = (body.prompt_cache_key or "").encode() or token_bytes(token_ids[:_AFFINITY_TOKENS])
        placement = place_tokens(
            token_ids, candidates, self._root_of(body, caller), use_cache=use_cache, affinity=affinity
        )
        return _plan(placement, caller, use_cache=use_cache, template=UNREGISTERED, note=_PASSED_ON)

    def tokenize_chat(self, body: ChatRequest, caller: Caller) -> list[int]:
        """The ids of a chat prompt after canonicalization, documents in the caller's order. Raises as ``plan_chat``."""
        self.check_model(body.model)
        with _nesting_refused():
            return self._application_prompt(self._canonicalizer.canonicalize(body, caller.tenant).layout)

    def root(self, tenant: str, fingerprint: str, cache_salt: str | None) -> bytes:
        """The key root of a tenant's prompts at engines with these weights, narrowed by ``cache_salt``."""
        return self._derive_root(Namespace(tenant, self._model, fingerprint, cache_salt or ""))

    def check_model(self, name: str) -> None:
        """Raises ``ModelNotFoundError`` unless ``name`` is the model that is served."""
        if name != self._model:
            raise ModelNotFoundError(f"The model {name[:128]!r} is not served here; {self._model!r} is.", param="model")

    def _decide(self, canonical: CanonicalPrompt, body: ChatRequest, caller: Caller) -> OrderDecision:
        if self._order_rule is None or len(canonical.layout.documents) < 2:
            return OrderDecision(canonical.order)
        return self._order_rule(canonical.template, canonical.order, body, caller)

    def _anatomy(self, canonical: CanonicalPrompt, placement: Placement) -> tuple[Sequence[Part], Sequence[int]]:
        prompt, layout = placement.prompt, canonical.layout
        assert prompt is not None, "a chat was rendered"
        documents = [layout.documents[index] for index in placement.order]
        parts = prompt_parts(layout, documents, canonical.filled, prompt.text)
        return parts, self._renderer.begun_before(prompt, locate(parts, prompt.text))

    def _comparison(self, layout: Layout, body: ChatRequest) -> Comparison:
        gold = body.headstart.gold if body.headstart is not None else None
        return Comparison(partial(self._to_compare, layout), tuple(gold or ()))

    def _application_prompt(self, layout: Layout) -> list[int]:
        """The ids with the documents in the caller's order."""
        return self._renderer.encode_prompt(self._renderer.render(layout.arrange(layout.documents), layout.tools))

    def _root_of(self, body: SamplingFields, caller: Caller) -> Callable[[Candidate], bytes]:
        """The key root per replica: who asks (never the body alone), which weights, and the body's own narrowing."""

        roots: dict[str, bytes] = {}

        def root(candidate: Candidate) -> bytes:
            fingerprint = candidate.info.fingerprint
            known = roots.get(fingerprint)
            if known is None:
                known = roots[fingerprint] = self.root(caller.tenant, fingerprint, body.cache_salt)
            return known

        return root


@contextmanager
def _nesting_refused() -> Iterator[None]:
    """Documents' attributes and tools are JSON of any shape; what is too deep to be written again is the caller's."""
    try:
        yield
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None


def _plan(
    placement: Placement,
    caller: Caller,
    *,
    use_cache: bool,
    template: str,
    document_ids: tuple[str, ...] = (),
    changes: tuple[Change, ...] = (),
    note: str | None = None,
    observation: Observation | None = None,
    arm: Arm | None = None,
    comparison: Comparison | None = None,
    sighting: Sighting | None = None,
    anatomy: Anatomy | None = None,
) -> Plan:
    return Plan(
        tokens=placement.tokens,
        root=placement.root,
        keys=placement.keys,
        replica_id=placement.candidate.replica_id,
        predicted_cached=placement.cached_tokens,
        template=template,
        tenant=caller.tenant,
        order=placement.mode,
        document_ids=document_ids,
        changes=changes,
        note=note,
        use_cache=use_cache,
        observation=observation,
        arm=arm,
        comparison=comparison,
        sighting=sighting,
        anatomy=anatomy,
    )


def _moved(placement: Placement) -> int:
    """How many documents stand at another place than the caller's."""
    return sum(index != position for position, index in enumerate(placement.order))


def order_changes(weighed: WeighedChat) -> tuple[Change, ...]:
    """What became of the documents' order, if anything did."""
    placement = weighed.chosen
    changes = []
    if placement.mode != weighed.decision.order and placement.mode == "canonical":
        changes.append(Change("order", "sorted by id: with this tokenizer their tokens depend on their place"))
    if moved := _moved(placement):
        reason = f"; the first {placement.led} lead on {placement.candidate.replica_id}" if placement.led else ""
        if placement.mode in _COUNTED and placement.led < len(placement.order) and weighed.snapshot.version:
            reason += f"; {'the rest' if placement.led else 'all'} by popularity snapshot {weighed.snapshot.version}"
        changes.append(Change("order", f"{moved} of {len(placement.order)} documents stand at another place{reason}"))
    return tuple(changes)


def _affinity(body: ChatRequest, layout: Layout) -> bytes:
    """What stays the same over the turns of a conversation: its key, or its first document or user message."""
    if body.prompt_cache_key:
        return body.prompt_cache_key.encode()
    if layout.documents:
        return str(layout.documents[0].fingerprint).encode()
    return next((message.content.encode() for message in layout.messages if message.role == "user"), b"")


def _uses_cache(body: SamplingFields) -> bool:
    return body.headstart is None or not body.headstart.bypass


def single_prompt(prompt: str | list[Any]) -> str | list[Any]:
    """The one prompt of a completion body: a text or a list of ids, also as the only element of a list.

    Raises:
        InvalidRequestError: there are several.
    """
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise InvalidRequestError("prompt may hold one text or one list of token ids.", param="prompt")
    return prompt


def _checked_ids(prompt: list[Any], vocab_size: int) -> list[int]:
    if any(isinstance(item, bool) or not isinstance(item, int) for item in prompt):
        raise InvalidRequestError("prompt must be a string or a list of token ids.", param="prompt")
    if prompt and (min(prompt) < 0 or max(prompt) >= vocab_size):
        message = f"prompt holds a token id outside 0 to {vocab_size - 1}."
        raise InvalidRequestError(message, param="prompt", code="invalid_token")
    return prompt
