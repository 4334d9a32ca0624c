"""Running an analysis: both passes side by side, the second in a process of its own where the log is worth one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from gateway.analysis.log import LogError
from gateway.analysis.passes import AsIsPass, CanonicalPass, Job, PassResult, learn
from gateway.analysis.report import Report, make_report
from gateway.errors import HeadstartError

__all__ = ["analyze"]

_WORTH_A_PROCESS: Final = 2_000_000
"""Bytes of a log from which on a second process saves more than it costs to start."""


def analyze(job: Job, progress: Callable[[str, float], None]) -> Report:
    """Learn from the log, then replay it as it is and canonicalized.

    ``progress`` gets the name of the step at hand and the fraction of it that is done. The same job gives the same
    report.

    Raises:
        LogError: the log cannot be read, or no line of it is a request.
        ConfigError: the model's folder or a template cannot be used.
    """
    job = msgspec.structs.replace(job, learner=learn(job, lambda fraction: progress("Learning", fraction)))
    both = _both if (os.cpu_count() or 1) > 1 and job.log.stat().st_size >= _WORTH_A_PROCESS else _in_turn
    as_is, canonical = both(job, progress)
    report = make_report(job, as_is, canonical)
    if not report.analysis.requests:
        first = f", the first: {report.bad_lines[0]}" if report.bad_lines else ""
        raise LogError(f"{job.name}: no line of it is a request ({len(report.bad_lines)} bad lines{first}).")
    return report


def _in_turn(job: Job, progress: Callable[[str, float], None]) -> tuple[PassResult, PassResult]:
    as_is = AsIsPass(job).run(lambda fraction: progress("Replaying", fraction / 2))
    canonical = CanonicalPass(job).run(lambda fraction: progress("Replaying", 0.5 + fraction / 2))
    return as_is, canonical


def _both(job: Job, progress: Callable[[str, float], None]) -> tuple[PassResult, PassResult]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_canonical_in_process, args=(theirs, job), name="canonical-pass", daemon=True)
    worker.start()
    theirs.close()
    try:
        as_is = AsIsPass(job).run(lambda fraction: progress("Replaying", fraction))
        try:
            canonical = ours.recv()
        except EOFError:
            raise LogError("The process that replays canonicalized prompts has ended early.") from None
    finally:
        worker.terminate()
        worker.join()
    if isinstance(canonical, HeadstartError):
        raise canonical
    assert isinstance(canonical, PassResult)
    return as_is, canonical


def _canonical_in_process(connection: Connection, job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        result: PassResult | HeadstartError = CanonicalPass(job).run(lambda fraction: None)
    except HeadstartError as error:
        result = error
    connection.send(result)
