"""How much pins may take together."""

from __future__ import annotations

from typing import Any

from gateway.pins.ceiling import Ceiling
from gateway.pins.prefix import Chain


def chain(*keys: int) -> Chain:
    return Chain(tuple(key.to_bytes(16, "big") for key in keys), [7] * 16 * len(keys), bytes(16))


def test_pins_are_taken_in_turn_and_what_they_share_counts_once(quiet_replica: Any) -> None:
    info = quiet_replica(num_blocks=20).info
    pins = [
        ("first", "a", chain(1, 2, 3)),
        ("shares two", "b", chain(1, 2, 4)),
        ("one too many", "a", chain(5, 6)),
        ("the last block", None, chain(1, 9)),
        ("nothing new", "a", chain(1, 2)),
    ]
    admission = Ceiling(0.25, lambda _: 0).admit(pins, info)
    assert list(admission.chains) == ["first", "shares two", "the last block", "nothing new"]
    assert admission.blocks == 5
    (reason,) = admission.refused.values()
    assert reason == (
        "all pins together would take 6 blocks, 1 more than the 5 of 20 that they may (limits.max_pinned_share = 0.25)"
    )


def test_a_quota_counts_the_pins_of_its_tenant_alone(quiet_replica: Any) -> None:
    info = quiet_replica(num_blocks=100).info
    pins = [
        ("theirs", "b", chain(10, 11, 12)),
        ("within", "a", chain(1, 2, 3)),
        ("beyond", "a", chain(1, 2, 4, 5)),
        ("by keys", None, chain(20, 21, 22, 23, 24)),
    ]
    admission = Ceiling(0.5, {"a": 4, "b": 0}.__getitem__).admit(pins, info)
    assert list(admission.refused) == ["beyond"]
    assert "would take 5 blocks, 1 more than its max_cached_blocks of 4" in admission.refused["beyond"]


def test_a_server_that_keeps_its_pool_to_itself_has_no_ceiling_but_its_context(quiet_replica: Any) -> None:
    info = quiet_replica(num_blocks=0, max_model_len=40).info
    admission = Ceiling(0.0, lambda _: 1).admit([("short", "a", chain(1, 2)), ("long", "a", chain(1, 2, 3))], info)
    assert list(admission.chains) == ["short"]
    assert admission.refused["long"] == "it has 48 tokens, prompts at most 39"
