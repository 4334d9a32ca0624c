"""Running an analysis: both passes side by side, the second in a process of its own where the log is worth one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from gateway.analysis.batch import write_arranged
from gateway.analysis.log import LogError
from gateway.analysis.passes import AsIsPass, CanonicalPass, Job, PassResult, learn, order_batch
from gateway.analysis.report import Report, make_report
from gateway.errors import HeadstartError
from gateway.prompt import PromptRenderer

__all__ = ["analyze"]

_WORTH_A_PROCESS: Final = 2_000_000
"""Bytes of a log from which on a second process saves more than it costs to start."""


def analyze(job: Job, progress: Callable[[str, float], None], ordered: Path | None = None) -> Report:
    """Learn from the log, then replay it as it is and canonicalized.

    ``progress`` gets the name of the step at hand and the fraction of it that is done. A batch is also written to the
    file ``ordered``, in the order that was found for it. The same job gives the same report.

    Raises:
        LogError: the log cannot be read, no line of it is a request, or ``ordered`` is the log or cannot be written.
        ConfigError: the model's folder or a template cannot be used.
    """
    if ordered is not None and ordered.exists() and ordered.samefile(job.log):
        raise LogError(f"{ordered} is the log itself: the batch must be written to another file.")
    side_by_side = (os.cpu_count() or 1) > 1 and job.log.stat().st_size >= _WORTH_A_PROCESS
    # The worker gets ready while we learn.
    with _no_search_for_cycles(), _Worker(job) if side_by_side else nullcontext() as worker:
        job = msgspec.structs.replace(job, learner=learn(job, lambda fraction: progress("Learning", fraction)))
        if job.batch:
            job = msgspec.structs.replace(job, orders=order_batch(job, lambda fraction: progress("Ordering", fraction)))
            if ordered is not None:
                write_arranged(job.log, job.name, job.orders or {}, ordered)
        if worker is None:
            as_is = AsIsPass(job).run(lambda fraction: progress("Replaying", fraction / 2))
            canonical = CanonicalPass(job).run(lambda fraction: progress("Replaying", 0.5 + fraction / 2))
        else:
            worker.begin(job)
            canonical = CanonicalPass(job).run(lambda fraction: progress("Replaying", fraction))
            as_is = worker.result()
    report = make_report(job, as_is, canonical)
    if not report.analysis.requests:
        first = f", the first: {report.bad_lines[0]}" if report.bad_lines else ""
        raise LogError(f"{job.name}: no line of it is a request ({len(report.bad_lines)} bad lines{first}).")
    return report


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """A replay leaves none, and each search for some goes through all that was remembered until then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Worker:
    """A process for the pass as it is, the shorter one: it begins later, as it has to get up first.

    Owned by the analysis, which ends it whatever happens.
    """

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, job.folder), name="as-is-pass", daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, job: Job) -> None:
        """Start the pass."""
        with suppress(BrokenPipeError):  # result() says so
            self._connection.send(job)

    def result(self) -> PassResult:
        """Wait for what it found. Raises what the pass raised."""
        try:
            result = self._connection.recv()
        except EOFError:
            raise LogError("The process that replays prompts as they are has ended early.") from None
        if isinstance(result, HeadstartError):
            raise result
        assert isinstance(result, PassResult)
        return result

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
        self._connection.close()


def _work(connection: Connection, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    result: PassResult | HeadstartError
    try:
        with _no_search_for_cycles():
            renderer = PromptRenderer(folder, lazy=True)
            result = AsIsPass(connection.recv(), renderer).run(lambda fraction: None)
    except HeadstartError as error:
        result = error
    except EOFError:  # the parent has given up
        return
    connection.send(result)
