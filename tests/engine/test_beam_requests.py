"""Beam search through the whole engine without a model: what beams share, hold and count, and how a search ends."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from engine.batch import Batch, ChunkResult
from engine.scripted import ScriptedRunner
from engine.wire import Output


def noise(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(count)]


def search(engine: Any, prompt: list[int], width: int, **options: Any) -> list[Output]:
    """All beams of one search."""
    id = engine.queue(prompt, n=width, beam_width=width, **options)
    engine.run()
    return [engine.whole(id, index) for index in range(width)]


def held(engine: Any) -> int:
    """Blocks that running sequences name."""
    return len({block for sequence in engine.core._scheduler.running for block in sequence.table.blocks})


def test_a_prompt_is_computed_once_and_its_blocks_are_shared_by_its_beams(scripted_engine: Any) -> None:
    engine = scripted_engine()
    id = engine.queue(noise(1, 40), n=4, beam_width=4, max_tokens=5)
    engine.step()
    assert engine.runner.computed_tokens == 40
    assert (engine.load.running, engine.load.used_blocks) == (4, 3)
    engine.step()
    parents = {tuple(sequence.table.blocks[:2]) for sequence in engine.core._scheduler.running}
    assert len(parents) == 1
    assert engine.load.used_blocks == held(engine) <= 2 + 4
    engine.run()
    assert engine.runner.computed_tokens == 40 + 4 * 4
    assert [len(engine.whole(id, index).token_ids) for index in range(4)] == [5] * 4


def test_a_beam_that_is_dropped_gives_its_blocks_back_at_once(scripted_engine: Any) -> None:
    engine = scripted_engine(block_size=4)
    engine.queue(noise(1, 18), n=1, beam_width=5, max_tokens=30)
    dropped = 0
    while engine.core.has_work():
        before = {id(sequence) for sequence in engine.core._scheduler.running}
        engine.step()
        now = {id(sequence) for sequence in engine.core._scheduler.running}
        dropped += len(before - now)
        assert engine.load.used_blocks == held(engine)
        assert len(now) in (0, 5)
    assert dropped > 5


def test_the_best_beams_come_out_whole_when_all_have_ended(scripted_engine: Any) -> None:
    engine = scripted_engine()
    every = search(engine, noise(1, 20), 4, max_tokens=9, logprobs=2)
    id = engine.queue(noise(1, 20), n=2, beam_width=4, max_tokens=9, logprobs=2, prompt_logprobs=1)
    for _ in range(9):
        assert not engine.told[id, 0].parts
        engine.step()
    engine.run()
    best = [engine.told[id, index].parts for index in range(2)]
    assert [len(parts) for parts in best] == [1, 1]
    for (output,), expected in zip(best, every, strict=False):
        assert output.token_ids == expected.token_ids
        assert output.text == "".join(f"w{token} " for token in output.token_ids) + "."
        assert output.logprobs == expected.logprobs
        assert [entry.token_id for entry in output.logprobs] == [*output.token_ids]
        assert all(len(entry.top) == 2 for entry in output.logprobs)
    assert [parts[0].cached_tokens for parts in best] == [0, None]  # the prompt counts once; nothing of it was read
    assert [len(parts[0].prompt_logprobs) for parts in best] == [19, 0]
    assert best[0][0].queue_s is not None
    assert engine.stats()["prompt_tokens"] == 2 * 20
    scores = [sum(entry.logprob for entry in output.logprobs) for output in every]
    assert scores == sorted(scores, reverse=True)
    assert len({output.token_ids for output in every}) == 4


def test_an_end_of_sequence_has_no_text_and_ends_a_beam(scripted_engine: Any) -> None:
    engine = scripted_engine(vocab_size=60, eos=(3, 7, 8, 40))
    beams = [beam for seed in range(6) for beam in search(engine, [seed], 4, max_tokens=12)]
    assert {beam.finish_reason for beam in beams} == {"stop", "length"}
    for beam in beams:
        assert not {3, 7, 8, 40} & {*beam.token_ids[:-1]}
        words = [f"w{token} " for token in beam.token_ids]
        if beam.finish_reason == "stop":
            assert beam.token_ids[-1] in (3, 7, 8, 40)
            del words[-1]
        else:
            assert len(beam.token_ids) == 12
        assert beam.text == "".join(words) + "."


def test_stop_strings_and_stop_token_ids_are_no_end_of_a_beam(scripted_engine: Any) -> None:
    engine = scripted_engine()
    plain = search(engine, noise(1, 20), 3, max_tokens=8)
    token = plain[0].token_ids[2]
    stopped = search(engine, noise(1, 20), 3, max_tokens=8, stop=(f"w{token}",), stop_token_ids=(token,), min_tokens=4)
    assert [beam.token_ids for beam in stopped] == [beam.token_ids for beam in plain]


def test_beams_count_as_running_from_their_admission(scripted_engine: Any) -> None:
    engine = scripted_engine(max_running=4, max_batch_tokens=32)
    engine.queue(noise(1, 60), n=3, beam_width=3, max_tokens=20)
    engine.queue(noise(3, 20))
    engine.queue(noise(2, 20), n=2, beam_width=2, max_tokens=3)
    most = 0
    while engine.core.has_work():
        load = engine.step().load
        most = max(most, load.running)
        assert load.running <= 4
    assert most == 4


def test_a_class_limit_counts_beams(scripted_engine: Any) -> None:
    engine = scripted_engine(max_batch_tokens=64)
    narrow = [engine.queue(noise(i, 20), max_tokens=6, priority=1, class_limit=3) for i in range(3)]
    wide = engine.queue(noise(8, 20), n=1, beam_width=6, max_tokens=6, priority=1, class_limit=3)
    while engine.core.has_work():
        engine.step()
        running = [sequence.id for sequence in engine.core._scheduler.running]
        assert len(running) <= 3 or {*running} == {wide}  # more than the limit run when they are the only ones
    assert {engine.whole(id).finish_reason for id in (*narrow, wide)} == {"length"}


@pytest.mark.parametrize("num_blocks", [8, 9, 12])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_search_that_fits_the_pool_only_beam_by_beam_gets_to_its_end(
    num_blocks: int, use_cache: bool, scripted_engine: Any
) -> None:
    roomy = scripted_engine(num_blocks=400, block_size=4)
    tight = scripted_engine(num_blocks=num_blocks, block_size=4, max_batch_tokens=6)
    for width in (2, 5):
        prompt = noise(width, 10)
        expected = search(roomy, prompt, width, max_tokens=22, logprobs=1)
        found = search(tight, prompt, width, max_tokens=22, logprobs=1, use_cache=use_cache)
        assert [beam.token_ids for beam in found] == [beam.token_ids for beam in expected]
        assert [beam.logprobs for beam in found] == [beam.logprobs for beam in expected]
    assert tight.load.preemptions > 0


def test_the_end_of_the_pool_ends_every_beam(scripted_engine: Any) -> None:
    engine = scripted_engine(num_blocks=4, block_size=4)
    beams = search(engine, noise(1, 10), 3, max_tokens=50)
    assert [(len(beam.token_ids), beam.finish_reason) for beam in beams] == [(6, "length")] * 3


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_an_abort_ends_every_choice_of_a_search(steps: int, scripted_engine: Any) -> None:
    engine = scripted_engine(max_batch_tokens=32)
    id = engine.queue(noise(1, 60), n=2, beam_width=4, max_tokens=20)
    for _ in range(steps):
        engine.step()
    engine.core.abort((id,))
    report = engine.step()
    assert [(output.index, output.finish_reason) for output in report.outputs] == [(0, "abort"), (1, "abort")]
    engine.run()


class Failing(ScriptedRunner):
    """Raises in its fifth step."""

    step = 0

    def execute(self, batch: Batch) -> list[ChunkResult]:
        self.step += 1
        if self.step == 5:
            raise RuntimeError("out of memory")
        return super().execute(batch)


def test_a_failing_step_ends_a_search_with_one_error(scripted_engine: Any) -> None:
    engine = scripted_engine(max_batch_tokens=32, runner=Failing)
    id = engine.queue(noise(1, 60), n=3, beam_width=4, max_tokens=20)
    engine.run()
    (error,) = engine.told[id, 0].parts
    assert error.error is not None
    assert not engine.told[id, 1].parts


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"beam_width": -1}, "beam_width"),
        ({"beam_width": 17}, "and 8"),
        ({"beam_width": 9}, "and 8"),
        ({"beam_width": 2, "n": 3}, "beam_width"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
        ({"beam_width": 8}, "vocabulary of 20"),
    ],
    ids=str,
)
def test_a_search_out_of_range_is_refused(wrong: dict[str, Any], told: str, scripted_engine: Any) -> None:
    engine = scripted_engine(max_running=8, vocab_size=20, eos=(4, 5))
    error = engine.ask([1, 2, 3], **wrong).error
    assert error is not None
    assert error[0] == "invalid_request"
    assert told in error[1]


def test_beams_on_a_reset_cache_are_the_same(scripted_engine: Any) -> None:
    engine = scripted_engine(block_size=4)
    expected = search(engine, noise(1, 30), 4, max_tokens=20)
    id = engine.queue(noise(1, 30), n=4, beam_width=4, max_tokens=20)
    for step in range(30):
        if not engine.core.has_work():
            break
        engine.step()
        if step % 3 == 0:
            engine.core.call("reset_cache", {})
    engine.run()
    assert [engine.whole(id, index).token_ids for index in range(4)] == [beam.token_ids for beam in expected]
