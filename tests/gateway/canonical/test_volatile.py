from __future__ import annotations

from gateway.canonical.templates import FilledTemplate, Template
from gateway.canonical.volatile import REFERENCE, hoist
from gateway.config import TemplateConfig

TEMPLATE = Template.compile("t", TemplateConfig("At {now}, {user} asks. Again: {now}"), normalize=True)


def test_values_leave_the_system_text_and_stay_visible_in_order_of_declaration() -> None:
    hoisted = hoist(FilledTemplate(TEMPLATE, {"now": "9:00", "user": "Ann"}))
    assert hoisted.system == f"At {REFERENCE}, {REFERENCE} asks. Again: {REFERENCE}"
    assert hoisted.metadata == "Metadata: now=9:00; user=Ann"
    assert [change.step for change in hoisted.changes] == ["volatile"]


def test_changes_name_fields_and_never_their_values() -> None:
    (change,) = hoist(FilledTemplate(TEMPLATE, {"now": "9:00", "user": "Ann"})).changes
    assert "user" in change.what
    assert "Ann" not in change.what


def test_the_system_text_is_the_same_for_all_values() -> None:
    one, other = (hoist(FilledTemplate(TEMPLATE, {"now": t, "user": u})) for t, u in (("1", "A"), ("2", "B")))
    assert one.system == other.system
    assert one.metadata != other.metadata


def test_l7_a_moved_value_is_not_moved_again() -> None:
    once = hoist(FilledTemplate(TEMPLATE, {"now": "9:00", "user": "Ann"}))
    values = TEMPLATE.match(once.system)
    assert values is not None
    twice = hoist(FilledTemplate(TEMPLATE, values))
    assert (twice.system, twice.metadata, twice.changes) == (once.system, None, ())


def test_a_template_without_fields_has_nothing_to_move() -> None:
    constant = Template.compile("c", TemplateConfig("Be brief."), normalize=True)
    assert hoist(FilledTemplate(constant, {})).metadata is None
