"""All stages in order: a chat request in, a layout whose documents only need their order out.

The order itself is chosen together with the replica, since it depends on what each of them holds.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.canonical.documents import Document, read_documents
from gateway.canonical.form import QUESTION
from gateway.canonical.layout import Layout, Pasted
from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.learning.observation import Observation, Source
from gateway.canonical.messages import Message, last_user_message, read_messages
from gateway.canonical.order import UNLIMITED, OrderLimits
from gateway.canonical.pasting import find_pasted, order_of_pasted, pasted_into_system, with_original_documents
from gateway.canonical.recognized import Region, find_undeclared
from gateway.canonical.registry import TemplateRegistry
from gateway.canonical.repetition import given_above, reference, reference_in_xml
from gateway.canonical.templates import UNREGISTERED, FilledTemplate
from gateway.canonical.text import normalize_system_messages, normalize_text, text_changes
from gateway.canonical.tools import canonical_tools
from gateway.canonical.volatile import hoist
from gateway.config import DEFAULT_TENANT, CanonicalConfig, HoistMode, OrderMode, TemplateConfig
from gateway.errors import InvalidRequestError
from gateway.plan import Change
from gateway.schema import ChatRequest, HeadstartOptions

__all__ = ["CanonicalPrompt", "Canonicalizer"]


class CanonicalPrompt(msgspec.Struct, frozen=True):
    """What canonicalization made of a request. ``note`` is as in ``gateway.plan.Plan``.

    ``order`` is the one asked for, within ``limits``.

    ``filled`` is the template of the system message with this request's values, whether they were moved or not;
    ``observation`` is set where it is none that was registered, to learn from.
    """

    layout: Layout
    filled: FilledTemplate | None
    template: str
    order: OrderMode
    limits: OrderLimits
    changes: tuple[Change, ...]
    note: str | None
    observation: Observation | None = None


class _System(msgspec.Struct, frozen=True):
    """The conversation after the system message was settled: normalized, filled in, recognised.

    ``learned``: ``filled`` is no registered template but one that was learned, if any. ``pasted`` are documents that
    the text holds although no template says so.
    """

    messages: tuple[Message, ...]
    filled: FilledTemplate | None
    changes: tuple[Change, ...]
    learned: bool = False
    pasted: Region | None = None


class _Documents(msgspec.Struct, frozen=True):
    """The documents that may take any order, and the labels of those that earlier turns hold."""

    documents: tuple[Document, ...]
    changes: tuple[Change, ...] = ()
    pasted: Pasted | None = None
    references: tuple[str, ...] = ()


class Canonicalizer:
    """The stages with the configuration's defaults and the registered templates.

    Holds no state of its own: as long as the same templates are registered and learned, the same body gives the same
    result. Without ``learned`` nothing is looked for in texts of no registered template.
    """

    def __init__(
        self, defaults: CanonicalConfig, templates: TemplateRegistry, learned: TemplateLearner | None = None
    ) -> None:
        self._defaults: Final = defaults
        self._templates: Final = templates
        self._learned: Final = learned

    def canonicalize(self, body: ChatRequest, tenant: str = DEFAULT_TENANT) -> CanonicalPrompt:
        """Run all stages but the order. Nothing is learned by that: see ``CanonicalPrompt.observation``.

        Raises:
            InvalidRequestError: messages, documents or the ``headstart`` object; ``param`` names the place.
        """
        options = body.headstart or HeadstartOptions()
        system, observation = self._recognized(body, options, tenant)
        template = system.filled.template if system.filled else None
        sources = (options, template.config if template else None, self._defaults)
        target = last_user_message(system.messages)
        if body.documents and target is None:
            raise InvalidRequestError("documents need a message with role 'user', the question.", param="documents")
        hoist_mode = options.hoist or (template and template.config.hoist) or self._defaults.hoist
        messages, metadata, hoist_changes = _hoist(system, hoist_mode, target)
        if system.learned and system.pasted is not None:  # fields in front of them may have been moved
            system = msgspec.structs.replace(system, pasted=find_undeclared(messages[0].content, system=True))
        tools, tool_changes = (
            canonical_tools(body.tools) if body.tools and self._defaults.text else (body.tools or [], ())
        )
        settled = _settle_documents(body, system, messages, target)
        structured = settled.pasted is None and bool(settled.documents or settled.references)
        layout = Layout(
            messages,
            target if structured or metadata is not None else None,
            settled.documents,
            metadata,
            tuple(tools),
            settled.pasted,
            template.layout.question if template and template.layout else QUESTION,
            settled.references,
            _said("hint", *sources),
        )
        order = options.order or (template and template.config.order) or self._defaults.order
        if settled.pasted is not None:
            order = order_of_pasted(template.config if template else None, options.order)
        idle = not structured and metadata is None and (settled.pasted is None or order == "preserve")
        return CanonicalPrompt(
            layout=layout,
            filled=system.filled,
            template=template.name if template else UNREGISTERED,
            order=order,
            limits=_limits(*sources) if settled.documents else UNLIMITED,
            changes=(*system.changes, *tool_changes, *hoist_changes, *settled.changes, *_layout_changes(layout)),
            note=_idle_note(system, hoist_mode, layout) if idle else None,
            observation=observation,
        )

    def recognize(self, body: ChatRequest, tenant: str) -> tuple[FilledTemplate | None, Observation | None]:
        """Of ``canonicalize`` only the template and what is to be learned. Raises ``InvalidRequestError`` likewise."""
        system, observation = self._recognized(body, body.headstart or HeadstartOptions(), tenant)
        return system.filled, observation

    def observation(self, body: ChatRequest, tenant: str) -> Observation | None:
        """Of ``recognize`` only what is to be learned. Raises ``InvalidRequestError`` likewise."""
        system = self._settle_system(read_messages(body.messages), body.headstart or HeadstartOptions())
        return self._observation(body, tenant, system)

    def _recognized(
        self, body: ChatRequest, options: HeadstartOptions, tenant: str
    ) -> tuple[_System, Observation | None]:
        system = self._settle_system(read_messages(body.messages), options)
        observation = self._observation(body, tenant, system)
        if observation is not None and self._learned is not None:
            filled = self._learned.recognize(observation.source, observation.text)
            system = msgspec.structs.replace(system, filled=filled, learned=True)
        return system, observation

    def _observation(self, body: ChatRequest, tenant: str, system: _System) -> Observation | None:
        """What to learn from: the first system message, where no registered template has its form."""
        mode = (body.headstart and body.headstart.hoist) or self._defaults.hoist
        leading = system.messages[0]
        if self._learned is None or system.filled is not None or not leading.is_system:
            return None
        if mode not in ("suggest", "apply"):
            return None
        return Observation(Source.of(tenant, body.model, body.prompt_cache_key), leading.content)

    def _settle_system(self, messages: tuple[Message, ...], options: HeadstartOptions) -> _System:
        """Normalize system texts, then find out which template the first one was made from or make it from one."""
        given = messages
        if self._defaults.text:
            messages = normalize_system_messages(messages)
        leading = messages[0] if messages[0].is_system else None
        if options.template is None:
            if options.fields is not None:
                raise InvalidRequestError("headstart.fields needs headstart.template.", param="headstart.template")
            return _recognized(given, messages, self._templates.recognize(leading.content) if leading else None)
        if leading is None:
            filled = self._templates.fill(options.template, options.fields or {})
            text = normalize_text(filled.text) if self._defaults.text else filled.text
            return _System((Message("system", text), *messages), filled, text_changes(given, messages))
        if options.fields is not None:
            raise InvalidRequestError(
                "Give either a system message or headstart.fields: the template makes the system message.",
                param="headstart.fields",
            )
        read = self._templates.named(options.template).read(leading.content)
        if read is None:
            raise InvalidRequestError(
                f"messages[0] has not the form of template {options.template!r}; leave it out and give "
                "headstart.fields instead.",
                param="messages[0].content",
            )
        return _recognized(given, messages, read)


def _recognized(given: tuple[Message, ...], messages: tuple[Message, ...], filled: FilledTemplate | None) -> _System:
    """Put documents in the leading system message back as they were ``given``: of those only the order is ours."""
    pasted = None
    if messages[0].is_system:
        text = messages[0].content
        if filled is not None:
            filled = with_original_documents(filled, given[0].content)
            text = filled.text
        else:
            pasted = pasted_into_system(text, given[0].content)
            text = text if pasted is None else pasted.text(pasted.documents)
        messages = (messages[0].with_content(text), *messages[1:])
    return _System(messages, filled, text_changes(given, messages), pasted=pasted)


def _hoist(
    system: _System, mode: HoistMode, target: int | None
) -> tuple[tuple[Message, ...], str | None, tuple[Change, ...]]:
    if system.filled is None or mode == "off" or target is None:
        return system.messages, None, ()
    if system.learned and mode != "apply":
        found = ", ".join(system.filled.values)
        return system.messages, None, (Change("volatile", f"found and left in place, as hoist is {mode}: {found}"),)
    hoisted = hoist(system.filled)
    return (system.messages[0].with_content(hoisted.system), *system.messages[1:]), hoisted.metadata, hoisted.changes


def _settle_documents(
    body: ChatRequest, system: _System, messages: tuple[Message, ...], target: int | None
) -> _Documents:
    """Read the body's documents, else find pasted ones; those given in earlier turns may be referred to."""
    template = system.filled.template if system.filled else None
    form = template.layout.document if template and template.layout else None
    refer = template is not None and template.config.repeat == "refer"
    documents, changes = read_documents(body.documents or ())
    if not documents:
        pasted = find_pasted(messages, system.filled, system.pasted, target)
        if pasted is None:
            return _Documents((), changes)
        given = given_above(pasted.region.documents, messages[: pasted.message]) if refer else frozenset[int]()
        if template is None or template.config.documents != "xml":
            given = frozenset()  # others have no label by which they could be referred to
        documents = tuple(
            reference_in_xml(document) if index in given else document
            for index, document in enumerate(pasted.region.documents)
        )
        return _Documents(documents, _reference_changes(given), pasted)
    if form is not None:
        documents = tuple(msgspec.structs.replace(document, written=form.write(document)) for document in documents)
    given = given_above(documents, messages[:target]) if refer else frozenset()
    return _Documents(
        tuple(document for index, document in enumerate(documents) if index not in given),
        (*changes, *_reference_changes(given)),
        references=tuple(reference(documents[index], form) for index in sorted(given)),
    )


def _reference_changes(given: frozenset[int]) -> tuple[Change, ...]:
    if not given:
        return ()
    return (Change("documents", f"referred to {len(given)} document(s) that stand in earlier turns already"),)


def _layout_changes(layout: Layout) -> tuple[Change, ...]:
    if not layout.documents:
        return ()
    count = f"{len(layout.documents)} document(s)"
    if layout.pasted is not None:
        return (Change("documents", f"{count} recognised in the text of messages[{layout.pasted.message}]"),)
    return (Change("layout", f"{count} laid out before the question of the last user message"),)


def _idle_note(system: _System, mode: HoistMode, layout: Layout) -> str:
    filled = system.filled
    documents = "no documents" if layout.pasted is None else "documents in the text keep their order"
    if filled is None:
        return f"{documents}, and no registered template has the form of the system message"
    if mode == "off":
        return f"{documents}, and hoist is off"
    if last_user_message(layout.messages) is None:
        return f"{documents}, and no user message to carry the template's fields"
    if system.learned and mode != "apply":
        return f"{documents}, and the fields found in the system message stay in place, as hoist is {mode}"
    return f"{documents}, and template {filled.template.name} has no field to move"


def _said(field: str, *sources: HeadstartOptions | TemplateConfig | CanonicalConfig | None) -> Any:
    """The value of ``field`` in the first of ``sources`` that has one."""
    return next((value for source in sources if (value := getattr(source, field, None)) is not None), None)


def _limits(*sources: HeadstartOptions | TemplateConfig | CanonicalConfig | None) -> OrderLimits:
    return OrderLimits(**{field: _said(field, *sources) for field in OrderLimits.__struct_fields__})
