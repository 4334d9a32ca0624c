from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.chat_template import ChatTemplate
from gateway.errors import ConfigError, InvalidRequestError

USER = [{"role": "user", "content": "hi"}]


def test_k3_a_template_that_reaches_for_the_system_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in (
        "{{ cycler.__init__.__globals__.os.popen('touch pwned-marker').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ):
        with pytest.raises(ConfigError, match="sandbox"):
            ChatTemplate(source, {})
    assert list(tmp_path.iterdir()) == []
    assert ChatTemplate("{{ raise_exception.__globals__ }}", {}).render(USER) == ""  # not even to look at


def test_k3_user_text_is_a_value_and_never_a_template() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    text = "{{7*7}} {% raw %} {# #}"
    assert template.render([{"role": "user", "content": text}]) == text


def test_a_malformed_template_is_a_configuration_error_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("fine\n{% for %}", {})


def test_a_templates_own_refusal_reaches_the_caller_and_other_text_does_not() -> None:
    strict = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported.') }}"
        "{% elif m.role == 'tool' %}{{ raise_exception('Got: ' + m.content) }}{% else %}{{ m.content.x.y }}{% endif %}"
        "{% endfor %}",
        {},
    )
    said = []
    for role in ("system", "tool", "user"):
        with pytest.raises(InvalidRequestError) as caught:
            strict.render([{"role": role, "content": "ZEBRA"}])
        assert caught.value.param == "messages"
        said.append(caught.value.message)
    assert "System role not supported." in said[0]
    assert not any("ZEBRA" in message for message in said)


def test_what_chat_templates_may_use_is_there() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ ns.n }}{{ {'b': '<é>', 'a': [1]} | tojson }}{{ dict(a=1).a }} {{ strftime_now('%Y') }}\n"
        "   {% if add_generation_prompt %}\nA:{% endif %}",
        {"bos_token": "<s>"},
    )
    rendered = template.render([*USER, *USER])
    assert re.fullmatch(r'<s>hi1\{"b": "<é>", "a": \[1\]\}1 \d{4}\nA:', rendered)
    assert not template.uses_tools
    assert ChatTemplate("{% if tools %}{{ tools | tojson }}{% endif %}", {}).uses_tools


def test_literal_text_is_what_the_template_can_write_by_itself() -> None:
    template = ChatTemplate("<a>{{ '<b>' + messages[0].content }}{% if '<c>' in 'x' %}<d>{% endif %}", {})
    assert all(token in template.literal_text for token in ("<a>", "<b>", "<c>", "<d>"))
    assert "content" not in template.literal_text


def test_the_short_ways_of_the_sandbox_lead_where_the_long_ones_do() -> None:
    source = (
        "{% for m in messages %}{{ m.role }} {{ m.absent is defined }} {{ m.items() | length }} {{ m['content'] }} "
        "{{ m.items is callable }} {{ loop.first }} {{ loop.last }} {{ loop.index }} {{ loop.index0 }} "
        "{{ loop.length }} {{ loop.revindex }} {{ loop.cycle(1, 2) }}\n{% endfor %}"
    )
    turns = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "there", "items": "hidden"}]
    expected = "user False 2 hi True True False 1 0 2 2 1\ntool False 3 there True False True 2 1 2 1 2\n"
    assert ChatTemplate(source, {}).render(turns) == expected
