"""The engine without a process around it: requests in, one step at a time, outputs and events out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from cache_policy.keys import token_list
from cache_policy.policy import UnknownPolicyError
from engine.admission import why_refused
from engine.batch import Batch, ChunkResult, Runner
from engine.beam import BeamSearch
from engine.blocks import BlockManager, BlockTable
from engine.errors import CallError, EngineError, InvariantError
from engine.request import Request
from engine.scheduler import Scheduled, Scheduler
from engine.sequence import Detokenizer, Sequence
from engine.wire import EngineInfo, Load, Output, StepReport, StepTiming, Submit

__all__ = ["DetokenizerFactory", "EngineCore"]

DetokenizerFactory = Callable[[tuple[str, ...]], Detokenizer]
"""Makes a request's detokenizer from its stop strings."""

_CALLS: Final = ("check", "pin", "pins", "reset_cache", "retell", "set_policy", "shutdown", "stats", "unpin")

_LISTED_OWNERS: Final = 32  # by ``stats``: those with most blocks

_log: Final = logging.getLogger(__name__)


class EngineCore:
    """Owns every request, the scheduler and the block manager. One thread calls it.

    The caller submits, and calls ``step`` as long as ``has_work``. Ids of ``submit`` and ``abort`` are the caller's;
    they must be unique among the requests that have not ended.
    """

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        detokenizer: DetokenizerFactory,
        max_running: int = 32,
        blocks: BlockManager | None = None,
    ) -> None:
        """Serve what ``info`` describes: its pool, limits, eos ids and policy are the ones enforced.

        ``runner`` must hold a pool of the same size. ``blocks`` replaces the block manager that is made from ``info``.
        """
        self._runner = runner
        self._info = info
        self._detokenizer = detokenizer
        self._blocks = blocks or BlockManager(
            info.num_blocks, info.block_size, info.policy, window=info.window, window_blocks=info.window_blocks
        )
        self._scheduler = Scheduler(self._blocks, max_batch_tokens=info.max_batch_tokens, max_running=max_running)
        self._eos = frozenset(info.eos_token_ids)
        self._requests: dict[int, Request] = {}  # those that have not ended
        self._pending: list[Output] = []  # endings that no step computed: refusals and aborts
        self._steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.consecutive_failures = 0
        """Steps in a row that raised; a caller gives up when there is no end to it."""

    @property
    def info(self) -> EngineInfo:
        """What is served, with the policy that is in force now."""
        return msgspec.structs.replace(self._info, policy=self._blocks.policy)

    def submit(self, request: Submit) -> None:
        """Queue a request. One that can never be served ends at once, with an ``error`` in the next step's report.

        Raises:
            ValueError: its id is in use.
        """
        if request.id in self._requests:
            raise ValueError(f"request id {request.id} is in use")
        try:
            tokens = token_list(request.tokens)
        except ValueError:
            tokens = []
        root = request.root if request.use_cache else None
        reads = request.sampling.prompt_logprobs is None
        limit = self._limit(BlockTable(tokens, root if reads else None))
        refusal = why_refused(request, tokens, self._info, max_tokens=limit, max_running=self._scheduler.max_running)
        if refusal is not None:
            self._pending.append(Output(request.id, finish_reason="error", error=refusal))
            return
        sequence = Sequence(
            request.id,
            tokens,
            root,
            request.sampling,
            self._detokenizer(request.sampling.stop),
            time.perf_counter(),
        )
        sequence.priority = sequence.urgency = request.priority
        sequence.class_limit = request.class_limit
        sequence.table.owner = self._blocks.owner(request.owner, request.max_cached_blocks)
        if request.sampling.prompt_logprobs is not None:
            sequence.score_prompt()
        if request.sampling.beam_width:
            sequence.search = BeamSearch(request.sampling, self._eos)
        else:
            sequence.add_siblings([self._detokenizer(request.sampling.stop) for _ in range(1, request.n)])
        self._requests[request.id] = Request(sequence, request.n)
        self._scheduler.add(sequence)

    def abort(self, ids: tuple[int, ...]) -> None:
        """End requests and release their blocks; ids that are unknown or have ended are ignored."""
        for id in ids:
            request = self._requests.get(id)
            if request is not None:
                self._pending += [self._counted(request, request.output(index, "abort")) for index in request.open]
                self._end(request)

    def has_work(self) -> bool:
        """Whether ``step`` has anything to compute or to report."""
        return bool(self._requests or self._pending or self._blocks.has_events)

    def step(self) -> StepReport | None:
        """Compute one batch and report it; None when there was nothing to do.

        An exception below ends the requests it affects with ``engine_error`` and is counted in
        ``consecutive_failures``; their blocks are released, and what was not computed is never published.
        """
        if not self.has_work():
            return None
        outputs, self._pending = self._pending, []
        timing = self._compute(outputs) if self._requests else None
        return StepReport(tuple(outputs), self.load(), timing, self._blocks.drain_events())

    def load(self) -> Load:
        """The state of queue and pool, and totals."""
        pool = self._blocks.stats()
        return Load(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            queued_tokens=self._scheduler.queued_tokens(),
            used_blocks=pool.used,
            cached_blocks=pool.idle,
            free_blocks=pool.empty,
            evictions=pool.evictions,
            preemptions=self._scheduler.preemptions,
            collisions_rejected=pool.collisions_rejected,
            steps=self._steps,
        )

    def snapshot(self) -> StepReport:
        """State and all hittable blocks, for a listener that has heard nothing yet."""
        return StepReport((), self.load(), None, self._blocks.resident())

    def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Carry out a control call of ``engine.wire.Call`` (but for ``shutdown``, which ends the process).

        Raises:
            CallError: the method or a parameter is unknown, or the invariants do not hold.
        """
        match method:
            case "reset_cache":
                dropped, kept = self._blocks.reset()
                return {"dropped": dropped, "kept": kept}
            case "retell":
                self._blocks.retell()
                return {}
            case "set_policy":
                try:
                    self._blocks.set_policy(str(params.get("policy")))
                except UnknownPolicyError as error:
                    raise CallError(str(error)) from error
                return {"policy": self._blocks.policy}
            case "pin":
                return self._pin(_chain(params))
            case "unpin":
                return {"released": self._blocks.unpin(_chain(params))}
            case "pins":
                pins = self._blocks.pins()
                return {"pins": [{"key": key, "blocks": count, "resident": there} for key, count, there in pins]}
            case "stats":
                return self._stats()
            case "check":
                try:
                    self._blocks.check()
                except EngineError as error:
                    raise CallError(str(error)) from error
                return {"ok": True}
        raise CallError(f"unknown method {method!r}; known: {', '.join(_CALLS)}")

    # --- inside ----------------------------------------------------------------------------------------

    def _stats(self) -> dict[str, Any]:
        """``Load``'s fields and what it leaves out. Prompt tokens count once per request, when it is first admitted."""
        pool, windows = self._blocks.stats(), self._blocks.window_stats()
        return {
            **msgspec.structs.asdict(self.load()),
            "num_blocks": self._blocks.num_blocks,
            "block_size": self._blocks.block_size,
            "policy": self._blocks.policy,
            "prompt_tokens": self._prompt_tokens,
            "cached_prompt_tokens": self._cached_tokens,
            "recomputed_tokens": self._scheduler.recomputed_tokens,
            "shared_in_flight": self._scheduler.shared_in_flight,
            "window": None if windows is None else msgspec.structs.asdict(windows),
            "pinned_blocks": pool.pinned,
            "pinned_keys": pool.pinned_keys,
            "owners": {
                owner.name: {"cached_blocks": owner.resident, "max_cached_blocks": owner.quota}
                for owner in self._blocks.owners()[:_LISTED_OWNERS]
            },
        }

    def _pin(self, keys: list[bytes]) -> dict[str, Any]:
        """Pin a chain; every request that has been accepted can still get as long as it may."""
        longest = max(
            (
                min(one.prompt_tokens + one.sampling.max_tokens, self._info.max_model_len)
                for one in (request.first for request in self._requests.values())
            ),
            default=1,
        )
        try:
            return {"blocks": len(keys), "resident": self._blocks.pin(keys, room_for=longest)}
        except EngineError as error:
            raise CallError(str(error)) from error

    def _limit(self, table: BlockTable) -> int:
        """The most tokens that a sequence may have; less than announced only while pinned blocks take up the pool."""
        return min(self._info.max_model_len, self._blocks.capacity(table))

    def _compute(self, outputs: list[Output]) -> StepTiming | None:
        """Run one batch and append what came of it."""
        # Where nobody runs and nobody can be admitted, the first in the queue is to blame.
        affected = [*self._scheduler.running] or self._scheduler.waiting[:1]
        started = time.perf_counter()
        try:
            step = self._scheduler.schedule()
            scheduled = step.scheduled
            if not scheduled:
                raise InvariantError("there are requests, but none of them could be scheduled")
            affected = [part.sequence for part in scheduled]
            for sequence in affected:
                if sequence.queue_s is None:
                    sequence.queue_s = started - sequence.arrived
            results = self._runner.execute(Batch([part.chunk for part in scheduled], step.copies))
            if len(results) != len(scheduled):
                raise EngineError(f"the runner returned {len(results)} results for {len(scheduled)} chunks")
        except Exception as error:
            self.consecutive_failures += 1
            self._fail(affected, error, outputs)
            return None
        self._steps += 1
        timing = _timing(scheduled, time.perf_counter() - started)
        per_token = timing.seconds / (timing.prefill_tokens + timing.decode_tokens)
        self.consecutive_failures = 0
        for part, result in zip(scheduled, results, strict=True):
            sequence = part.sequence
            request = self._requests.get(sequence.id)
            if request is None:  # a choice before it has failed, and with it the request
                continue
            if not part.decode and not sequence.generated:
                sequence.prefill_s += per_token * len(part.chunk.tokens)
            try:
                outputs += self._advance(request, part, result)
            except Exception as error:
                self._fail([sequence], error, outputs)
        return timing

    def _advance(self, request: Request, part: Scheduled, result: ChunkResult) -> list[Output]:
        """Take in what was computed for one sequence; outputs when that completed a token or a search."""
        sequence, chunk = part.sequence, part.chunk
        self._blocks.commit(sequence.table, chunk.start + len(chunk.tokens))
        if chunk.scored:
            sequence.score_prompt(result.prompt_logprobs)
        if not chunk.sample:
            return []
        if sequence.search is not None:
            return self._search(request, sequence.search, sequence.index, result)
        self._scheduler.fork(sequence)
        if result.token is None:
            raise EngineError("the runner sampled no token")
        sequence.tokens.append(result.token)
        text, reason = self._judge(sequence, result.token)
        logprobs = () if result.logprobs is None else (result.logprobs,)
        output = request.output(sequence.index, reason, text, (result.token,), logprobs)
        if reason is not None:
            self._end(request, sequence)
        return [self._counted(request, output)]

    def _search(self, request: Request, search: BeamSearch, index: int, result: ChunkResult) -> list[Output]:
        """Take in what a beam offers, and when it was the last one go on with the search; outputs when it has ended."""
        if not result.candidates:
            raise EngineError("the runner told no candidates")
        if not search.offer(index, result.candidates):
            return []
        beams = request.live
        generated, length = beams[0].generated + 1, len(beams[0].tokens) + 1
        last = generated >= beams[0].sampling.max_tokens or any(length >= self._limit(beam.table) for beam in beams)
        branches = search.advance(last=last)
        if branches:
            request.live = self._scheduler.branch(beams, branches)
            return []
        outputs = []
        for choice, hypothesis in enumerate(search.hypotheses[: request.n]):
            told = hypothesis.candidates()
            token_ids = tuple(candidate.token_id for candidate in told)
            logprobs = tuple(candidate.logprobs for candidate in told if candidate.logprobs is not None)
            text = self._text(token_ids[:-1] if hypothesis.finish_reason == "stop" else token_ids)
            outputs.append(
                self._counted(request, request.output(choice, hypothesis.finish_reason, text, token_ids, logprobs))
            )
        self._end(request)
        return outputs

    def _text(self, token_ids: tuple[int, ...]) -> str:
        detokenizer = self._detokenizer(())
        return "".join([detokenizer.push(token)[0] for token in token_ids]) + detokenizer.finish()

    def _judge(self, sequence: Sequence, token: int) -> tuple[str, str | None]:
        """The text that the newest token completes, and the finish reason if it is the last one.

        ``min_tokens`` holds back eos and stop token ids, not stop strings.
        """
        sampling, detokenizer = sequence.sampling, sequence.detokenizer
        if sequence.generated >= sampling.min_tokens and (
            (token in self._eos and not sampling.ignore_eos) or token in sampling.stop_token_ids
        ):
            return detokenizer.finish(), "stop"
        text, stopped = detokenizer.push(token)
        if stopped:
            return text, "stop"
        if sequence.generated >= sampling.max_tokens or len(sequence.tokens) >= self._limit(sequence.table):
            return text + detokenizer.finish(), "length"
        return text, None

    def _counted(self, request: Request, output: Output) -> Output:
        """Add up what a request's first output says of its prompt."""
        if output.cached_tokens is not None:
            self._prompt_tokens += request.first.prompt_tokens
            self._cached_tokens += output.cached_tokens
        return output

    def _end(self, request: Request, sequence: Sequence | None = None) -> None:
        """Forget a request, or one sequence of it, and release its blocks."""
        for ending in [*request.live] if sequence is None else [sequence]:
            self._scheduler.remove(ending)
            request.live.remove(ending)
        if not request.live:
            del self._requests[request.id]

    def _fail(self, sequences: list[Sequence], error: Exception, outputs: list[Output]) -> None:
        """End the affected requests with an error that says what kind it was, and log where it came from."""
        affected = {sequence.id: None for sequence in sequences}  # in order, each request once
        _log.error("a step failed; %d requests end with an error", len(affected), exc_info=error)
        reason = ("engine_error", f"the engine failed while computing this request ({type(error).__name__})")
        for id in affected:
            request = self._requests[id]
            outputs.append(self._counted(request, request.output(request.open[0], "error", error=reason)))
            self._end(request)


def _chain(params: dict[str, Any]) -> list[bytes]:
    """The keys that a call names.

    Raises:
        CallError: they are no chain of keys.
    """
    keys = params.get("keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(key, bytes) and key for key in keys):
        raise CallError("keys must be the block keys of a prefix, from its first block on")
    return keys


def _timing(scheduled: list[Scheduled], seconds: float) -> StepTiming:
    prefill_tokens = prefill_context = decode_tokens = decode_context = 0
    for part in scheduled:
        start, count = part.chunk.start, len(part.chunk.tokens)
        if part.decode:
            decode_tokens += 1
            decode_context += start
        else:
            prefill_tokens += count
            prefill_context += count * start + count * (count - 1) // 2
    return StepTiming(prefill_tokens, prefill_context, decode_tokens, decode_context, seconds)
