from __future__ import annotations

from gateway.canonical.crowding import first_to_leave
from gateway.canonical.sighting import Scope


def test_the_longest_unused_entry_of_the_largest_tenant_leaves_first() -> None:
    table = {Scope("a", "x"): 5, Scope("b", "x"): 4, Scope("b", "y"): 2}
    assert first_to_leave(table, lambda held: held) == Scope("b", "x")
    assert first_to_leave(table, lambda held: held * held) == Scope("a", "x")


def test_of_equal_tenants_it_is_the_longest_unused_of_all() -> None:
    table = {Scope("c", "x"): 1, Scope("a", "x"): 1, Scope("b", "x"): 1}
    assert first_to_leave(table, lambda _: 1) == Scope("c", "x")
