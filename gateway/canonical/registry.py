"""All templates that requests name or are recognised by: the configuration's and those written while it runs.

Lookups read one immutable snapshot; a write swaps it whole, so that no request ever sees half of a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gateway.canonical.templates import MAX_VALUE_CHARS, RESERVED_NAMES, FilledTemplate, Template, is_value
from gateway.config import TemplateConfig
from gateway.errors import ConfigError, InvalidRequestError

__all__ = ["TemplateRegistry"]


class TemplateRegistry:
    """Finds templates by name and by text. Owns the snapshot of what is registered; belongs to the event loop.

    A name of the configuration is never taken by a written template. ``normalize`` tells whether the texts of requests
    are normalized (see ``text``), and with them those of templates.
    """

    def __init__(self, configured: Mapping[str, TemplateConfig], *, normalize: bool) -> None:
        """Compile the templates of the configuration; raises ``ConfigError`` on the first that cannot be."""
        for name in configured:
            if name in RESERVED_NAMES:
                raise ConfigError(f"templates.{name}: this name stands for requests of no template, or of several.")
            if "@" in name:
                raise ConfigError(f"templates.{name}: a name holds no '@', which stands before a version.")
        self._normalize: Final = normalize
        self.configured: Final = {name: self.compile(name, config) for name, config in configured.items()}
        self._by_name: Mapping[str, Template] = self.configured
        self._most_specific_first: Sequence[Template] = ()
        self.generation = 0
        """Changes whenever other templates are registered."""
        self.publish(())

    def compile(self, name: str, config: TemplateConfig, version: int = 0) -> Template:
        """A template as it would be registered. Raises ``ConfigError`` when it is malformed."""
        return Template.compile(name, config, normalize=self._normalize, version=version)

    @property
    def by_name(self) -> Mapping[str, Template]:
        """All templates as requests can name them, ``NAME@VERSION`` included."""
        return self._by_name

    def publish(self, written: Iterable[Template]) -> None:
        """Register these templates besides the configuration's, in place of all written before.

        The last version of a name goes by the name alone, each by ``NAME@VERSION``.
        """
        shown = [template for template in written if template.name not in self.configured]
        by_name = dict(self.configured)
        for template in sorted(shown, key=lambda template: template.version):
            by_name[template.name] = by_name[f"{template.name}@{template.version}"] = template
        self._by_name = by_name
        self.generation += 1
        self._most_specific_first = sorted(
            (*self.configured.values(), *shown),
            key=lambda template: (-template.literal_chars, template.version != 0, template.name, -template.version),
        )

    def fill(self, name: str, values: Mapping[str, str]) -> FilledTemplate:
        """The template called ``name`` with ``values`` from the body's ``headstart`` object.

        Raises:
            InvalidRequestError: no such template, or ``values`` are not exactly its fields.
        """
        template = self.named(name)
        _check_values(template, values)
        documents = values.get(template.documents_slot, "") if template.documents_slot else ""
        return FilledTemplate(template, {field: values[field] for field in template.fields}, documents)

    def named(self, name: str) -> Template:
        """The template called ``name`` or ``NAME@VERSION``. Raises ``InvalidRequestError`` when there is none."""
        template = self._by_name.get(name)
        if template is None:
            known = ", ".join(sorted({template.name for template in self._most_specific_first}))[:512]
            there = f"there are: {known}" if known else "none is registered"
            raise InvalidRequestError(
                f"headstart.template: there is no template {name[:80]!r} ({there}).", param="headstart.template"
            )
        return template

    def recognize(self, text: str) -> FilledTemplate | None:
        """Which template ``text`` was made from; of several the one with most text of its own."""
        for template in self._most_specific_first:
            filled = template.read(text)
            if filled is not None:
                return filled
        return None


def _check_values(template: Template, values: Mapping[str, str]) -> None:
    """Raise ``InvalidRequestError`` unless ``values`` are exactly the fields of ``template``, one line each."""
    for field in template.fields:
        if field not in values:
            raise InvalidRequestError(
                f"headstart.fields.{field} is missing: template {template.name!r} declares it.",
                param=f"headstart.fields.{field}",
            )
    for field, value in values.items():
        if field == template.documents_slot:
            continue
        if field not in template.fields:
            declared = ", ".join(template.fields) or "no field"
            raise InvalidRequestError(
                f"headstart.fields.{field[:64]} is not declared by template {template.name!r}, which has {declared}.",
                param=f"headstart.fields.{field[:64]}",
            )
        if not is_value(value):
            raise InvalidRequestError(
                f"headstart.fields.{field} must be one line of at most {MAX_VALUE_CHARS} characters.",
                param=f"headstart.fields.{field}",
            )
