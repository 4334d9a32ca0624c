"""The model's chat template: Jinja from a model folder, run in a sandbox.

A template comes with the weights and may be hostile; user text reaches it only as the value of variables. The names it
may use are those Hugging Face documents for chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import ConfigError, InvalidRequestError

__all__ = ["ChatTemplate"]

_PROBE: Final = [{"role": "user", "content": "probe"}]


class ChatTemplate:
    """One compiled template. Immutable.

    ``variables`` are the special tokens' spellings (``bos_token``, ``eos_token``, …).
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile and try out. Raises ``ConfigError`` when the template is malformed or leaves the sandbox."""
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template: Final = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # it comes as a chain of two, slow to go through
        except TemplateSyntaxError as error:
            raise ConfigError(f"The model's chat template is malformed at line {error.lineno}: {error}.") from error
        self._source: Final = source
        self._variables: Final = dict(variables)
        self.uses_tools: Final = "tools" in meta.find_undeclared_variables(tree)
        self.knows_developer: Final = "developer" in source
        self.literal_text: Final = "\0".join(
            {node.data for node in tree.find_all(nodes.TemplateData)}
            | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        )
        with suppress(InvalidRequestError):  # some templates insist on a system message or on other turns
            self.render(_PROBE)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text.

        Raises:
            InvalidRequestError: the template refuses these messages.
            ConfigError: the template tried what the sandbox forbids.
        """
        try:
            # As Template.render does it, but for copying all names twice.
            names = {
                **self._template.globals,
                **self._variables,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            return "".join(self._template.root_render_func(self._template.new_context(names, shared=True)))
        except SecurityError as error:
            raise ConfigError("The model's chat template does what a sandbox forbids; it is not used.") from error
        except Exception as error:  # whatever a template can raise, from TypeError to RecursionError
            raise InvalidRequestError(self._refusal(error), param="messages") from error

    def _refusal(self, error: Exception) -> str:
        # Only words that stand in the template itself are passed on: others could hold the prompt.
        said = str(error)
        if isinstance(error, TemplateError) and said and said in self._source:
            return f"The model's chat template refuses these messages: {said}"
        return f"The model's chat template cannot render these messages ({type(error).__name__})."


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks training targets; for serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put the body in place of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with short ways to what every template asks for and the sandbox allows after a long look."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``message.role`` and ``loop.first``."""
        if type(obj) is LoopContext and attribute in _LOOP_NUMBERS:
            return getattr(obj, attribute)
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


_LOOP_NUMBERS: Final = frozenset({"first", "last", "index", "index0", "length"})


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
