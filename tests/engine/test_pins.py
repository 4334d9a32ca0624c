"""Pinned prefixes: what a pin protects, what it may take, and what it costs the rest of the pool."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from cache_policy.keys import chain_keys, token_bytes
from cache_policy.policies.lru import LruPolicy
from cache_policy.policy import POLICY_NAMES
from engine.blocks import BlockManager, BlockTable
from engine.core import EngineCore
from engine.errors import CallError, NoSpaceError, PinLimitError
from engine.scripted import ScriptedRunner
from engine.wire import EngineInfo, Output, Sampling, Submit

BLOCK = 4
ROOT = b"namespace-number"
VOCABULARY = 10_000


def tok(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def keys(tokens: list[int]) -> list[bytes]:
    return chain_keys(ROOT, tokens, BLOCK)


def run(blocks: BlockManager, tokens: list[int]) -> int:
    """Compute and free again; the tokens that were hit."""
    table = BlockTable([*tokens], ROOT)
    hit = blocks.allocate(table)
    blocks.commit(table, len(tokens))
    blocks.free(table)
    blocks.check()
    return hit


def lookup(blocks: BlockManager, tokens: list[int]) -> int:
    return blocks.lookup(BlockTable([*tokens, 0], ROOT))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_pinned_prefix_outlives_any_pressure_and_leaves_once_it_is_unpinned(policy: str) -> None:
    blocks = BlockManager(16, BLOCK, policy)
    prefix = tok(0, 6)
    run(blocks, prefix)
    assert blocks.pin(keys(prefix)) == 6
    for i in range(20):
        run(blocks, tok(1000 * (i + 1), 10))
    assert lookup(blocks, prefix) == 24
    assert blocks.stats().pinned == 6
    assert blocks.unpin(keys(prefix)) == 6
    blocks.check()
    for i in range(20):
        run(blocks, tok(1000 * (i + 30), 16))
    assert lookup(blocks, prefix) == 0
    assert blocks.stats().pinned == 0


def test_a_pin_protects_what_comes_later() -> None:
    blocks = BlockManager(16, BLOCK)
    prefix = tok(0, 6)
    assert blocks.pin(keys(prefix)) == 0
    assert (blocks.stats().pinned, blocks.stats().pinned_keys) == (0, 6)
    run(blocks, prefix[:12])  # another request brings a part of it
    run(blocks, prefix)
    assert blocks.pins() == [(keys(prefix)[-1], 6, 6)]
    run(blocks, tok(1000, 10))
    assert lookup(blocks, prefix) == 24


def test_a_reset_drops_the_blocks_and_keeps_the_pin() -> None:
    blocks = BlockManager(16, BLOCK)
    prefix = tok(0, 6)
    run(blocks, prefix)
    blocks.pin(keys(prefix))
    assert blocks.reset() == (6, 0)
    blocks.check()
    assert (blocks.stats().pinned, lookup(blocks, prefix)) == (0, 0)
    run(blocks, prefix)
    assert blocks.stats().pinned == 6


def test_idle_pinned_blocks_are_not_available() -> None:
    blocks = BlockManager(8, BLOCK)
    run(blocks, tok(0, 4))
    blocks.pin(keys(tok(0, 4)))
    assert blocks.evict(8) == []
    blocks.allocate(BlockTable(tok(100, 4), ROOT))
    with pytest.raises(NoSpaceError):
        blocks.allocate(BlockTable([7], ROOT))
    assert (blocks.stats().used, blocks.stats().idle, blocks.stats().empty) == (4, 4, 0)
    table = BlockTable([*tok(0, 4)], ROOT)
    with pytest.raises(NoSpaceError):  # what is hit is free, the rest is not
        blocks.allocate(table)
    blocks.check()


def test_pins_take_at_most_their_share_and_a_refused_one_changes_nothing() -> None:
    blocks = BlockManager(16, BLOCK)
    blocks.pin(keys(tok(0, 6)))
    with pytest.raises(PinLimitError, match="9 blocks would be pinned, at most 8"):
        blocks.pin(keys(tok(0, 4) + tok(500, 3)))
    assert blocks.stats().pinned_keys == 6
    assert len(blocks.pins()) == 1
    blocks.pin(keys(tok(0, 4) + tok(500, 2)))  # what is common counts once
    assert blocks.stats().pinned_keys == 8
    with pytest.raises(PinLimitError):
        blocks.pin(keys(tok(0, 1) + tok(700, 1)))
    blocks.check()


def test_pins_overlap_and_are_given_up_one_by_one() -> None:
    blocks = BlockManager(16, BLOCK)
    run(blocks, tok(0, 6))
    blocks.pin(keys(tok(0, 6)))
    blocks.pin(keys(tok(0, 2)))
    blocks.pin(keys(tok(0, 2)))  # once more is no more
    assert blocks.unpin(keys(tok(0, 3))) == 0  # no pin ends there
    assert blocks.unpin(keys(tok(0, 6))) == 4
    assert blocks.stats().pinned == 2
    assert blocks.unpin(keys(tok(0, 2))) == 2
    assert blocks.stats().pinned == blocks.stats().pinned_keys == 0
    assert blocks.unpin(keys(tok(0, 2))) == 0
    blocks.check()


def test_keys_that_are_no_chain_pin_only_what_follows_from_the_root() -> None:
    blocks = BlockManager(16, BLOCK)
    run(blocks, tok(0, 4))
    first, second, third, _ = keys(tok(0, 4))
    assert blocks.pin([second, third]) == 0
    assert blocks.pin([first, third, first]) == 1
    assert blocks.stats().pinned == 1
    assert len(blocks.evict(16)) == 3
    blocks.check()


def test_the_policy_never_looks_at_pinned_blocks() -> None:
    class Counting(LruPolicy):
        looks = 0

        def victim(self, evictable: Callable[[int], bool]) -> int | None:
            def counted(block: int) -> bool:
                self.looks += 1
                return evictable(block)

            return super().victim(counted)

    blocks = BlockManager(256, BLOCK)
    policy = blocks._pool.eviction.policy = Counting(256)
    run(blocks, tok(0, 128))  # the oldest
    blocks.pin(keys(tok(0, 128)))
    for i in range(20):
        run(blocks, tok(1000 * (i + 1), 100))
    assert blocks.stats().evictions > 1000
    assert policy.looks == blocks.stats().evictions


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_switching_the_policy_keeps_pins(policy: str) -> None:
    blocks = BlockManager(16, BLOCK)
    run(blocks, tok(0, 6))
    blocks.pin(keys(tok(0, 6)))
    run(blocks, tok(500, 4))
    blocks.set_policy(policy)
    blocks.check()
    run(blocks, tok(1000, 10))
    assert lookup(blocks, tok(0, 6)) == 24
    blocks.unpin(keys(tok(0, 6)))
    blocks.check()
    assert len(blocks.evict(16)) == 16


# --- the engine ------------------------------------------------------------------------------------------


class Words:
    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


@pytest.fixture
def core() -> EngineCore:
    info = EngineInfo("m", "", "f", "b", 16 * BLOCK, 16, BLOCK, "none", "cpu", VOCABULARY, (), "lru", 64)
    runner = ScriptedRunner(16, BLOCK, vocab_size=VOCABULARY)
    return EngineCore(runner, info, detokenizer=lambda _stop: Words())


def serve(core: EngineCore, tokens: list[int], count: int = 1) -> Output:
    """The last output of a request that runs alone."""
    core.submit(Submit(0, token_bytes(tokens), ROOT, Sampling(max_tokens=count, temperature=0.0)))
    while core.has_work():
        report = core.step()
        core.call("check", {})
        assert report is not None
        if report.outputs:
            last = report.outputs[-1]
    return last


def test_the_calls_pin_list_and_unpin(core: EngineCore) -> None:
    prefix = tok(0, 6)
    assert core.call("pin", {"keys": keys(prefix)}) == {"blocks": 6, "resident": 0}
    serve(core, prefix)
    for i in range(5):
        serve(core, tok(1000 * (i + 1), 8))
    assert serve(core, prefix).cached_tokens == 20
    assert core.call("pins", {}) == {"pins": [{"key": keys(prefix)[-1], "blocks": 6, "resident": 6}]}
    stats = core.call("stats", {})
    assert (stats["pinned_blocks"], stats["pinned_keys"]) == (6, 6)
    assert core.call("unpin", {"keys": keys(prefix)}) == {"released": 6}
    assert core.call("pins", {}) == {"pins": []}


def test_a_pin_that_takes_too_much_is_refused_with_the_reason(core: EngineCore) -> None:
    with pytest.raises(CallError, match="at most 8"):
        core.call("pin", {"keys": keys(tok(0, 9))})
    assert core.call("pins", {}) == {"pins": []}


@pytest.mark.parametrize("wrong", [{}, {"keys": []}, {"keys": [1]}, {"keys": b"key"}, {"keys": [b""]}])
@pytest.mark.parametrize("method", ["pin", "unpin"])
def test_what_is_no_chain_is_refused(core: EngineCore, method: str, wrong: dict[str, object]) -> None:
    with pytest.raises(CallError, match="block keys of a prefix"):
        core.call(method, wrong)


def test_what_does_not_fit_beside_the_pins_is_refused_at_once_and_fits_after_them(core: EngineCore) -> None:
    core.call("pin", {"keys": keys(tok(0, 8))})
    refused = serve(core, tok(500, 8))
    assert refused.error is not None
    assert refused.error[0] == "context_length_exceeded"
    assert "32" in refused.error[1]
    assert serve(core, tok(500, 8)[:-1], count=30).finish_reason == "length"
    assert serve(core, tok(0, 8) + tok(500, 7), count=30).finish_reason == "length"  # its own pin is room for it
    core.call("unpin", {"keys": keys(tok(0, 8))})
    assert serve(core, tok(500, 8)).error is None


def test_a_pin_never_takes_the_room_of_a_request_in_hand(core: EngineCore) -> None:
    core.submit(Submit(0, token_bytes(tok(500, 3)), ROOT, Sampling(max_tokens=24, temperature=0.0)))
    core.step()
    with pytest.raises(CallError, match="at most 7"):
        core.call("pin", {"keys": keys(tok(0, 8))})
    core.call("pin", {"keys": keys(tok(0, 7))})
    outputs: list[Output] = []
    while core.has_work():
        report = core.step()
        assert report is not None
        outputs += report.outputs
    assert sum(len(output.token_ids) for output in outputs) == 23


def test_a_pin_over_the_wire_is_what_the_engine_takes(core: EngineCore) -> None:
    params = msgspec.msgpack.decode(msgspec.msgpack.encode({"keys": keys(tok(0, 2))}))
    assert core.call("pin", params) == {"blocks": 2, "resident": 0}
