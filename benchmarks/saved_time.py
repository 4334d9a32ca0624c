"""Hold estimates of saved prefill time against what is measured, on a RAG request log sent one request at a time.

    python -m benchmarks.saved_time DATA/rag_xquad_en --requests 500
    python -m benchmarks.saved_time --replay RECORDS

A share of the requests (a fifth) is kept from the cache, drawn with a fixed seed. Of each of them the prefill that was
foretold before it was sent is compared with what the engine then took. Prints the median error and the share of
requests within the interval that is meant to hold nine of ten, and whether both are as good as they should be (10 %,
85 to 95 %); ``--json`` prints one JSON object with that and the curve.

With ``--again`` each request that was kept from the cache is then sent through it: the difference of the two times is
what the cache saved, and is compared with what was estimated of it.

Everything that was measured is kept in a file, also of a run that was interrupted. ``--replay`` goes through such a
file without an engine, and estimates anew: so a change of the estimates can be tried on what was measured before.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from rich.progress import MofNCompleteColumn

from benchmarks.rag_log import log_config, read_bodies
from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.cli.terminal import NOTES, fetch_model, print_json, progress_bar
from gateway.configuration import model_spec
from gateway.demo.client import Client
from gateway.logs import configure_logging
from gateway.replicas.base import Replica
from gateway.server import run, serving
from gateway.service import Gateway, configured_gateway
from gateway.stats.cost import PrefillCost
from gateway.stats.record import HeldOut, RequestRecord

MOST_ERROR: Final = 0.10
COVERAGE: Final = (0.85, 0.95)


class Up(msgspec.Struct, frozen=True, tag="up"):
    """The engine has come up; ``profile`` are its warm-up steps."""

    profile: tuple[StepTiming, ...]
    max_batch_tokens: int


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """The next request was sent; ``again`` tells that it is one that was kept from the cache just before."""

    again: bool = False


class Step(msgspec.Struct, frozen=True, tag="step"):
    """The engine has computed a step."""

    timing: StepTiming


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The request has ended."""

    record: RequestRecord


Line = Up | Sent | Step | Answered


class Records:
    """A ``ReplicaObserver`` that writes what happens to ``file``, one JSON object a line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Final = file

    def write(self, line: Line) -> None:
        """Write one line, at once."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """Write its profile."""
        self.write(Up(info.profile, info.max_batch_tokens))

    def on_down(self, replica: Replica, reason: str) -> None:
        """It is said by the requests that fail."""

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Of no interest here."""

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Write its time."""
        self.write(Step(timing))


def read_records(path: Path) -> Iterator[Line]:
    """The lines of a file of records, the last one left out where it was cut off."""
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


class Pair(msgspec.Struct, frozen=True):
    """What the cache saved of a request by two measurements, in seconds, beside what was estimated."""

    measured: float
    estimated: float
    below: float
    above: float


class Replay:
    """Goes through records as the gateway did. Owns the curve that is fitted to them.

    ``held_out`` has what was foretold of the requests that were kept from the cache, ``pairs`` those that were sent
    again. With ``anew`` both are estimated by the code there is now, else they are those of the records.
    """

    def __init__(self, *, anew: bool) -> None:
        self.requests = self.prompt_tokens = self.cached_tokens = 0
        self.held_out: list[HeldOut] = []
        self.pairs: list[Pair] = []
        self.cost: Final = PrefillCost()
        self._anew: Final = anew
        self._again = False
        self._whole: float | None = None  # what the last one that was kept from the cache took

    def follow(self, lines: Iterator[Line]) -> None:
        """Go through ``lines`` to their end."""
        curve = self.cost.curve
        for line in lines:
            match line:
                case Up():
                    self.cost.seed(line.profile, line.max_batch_tokens)
                case Step():
                    self.cost.observe(line.timing)
                case Sent():
                    curve, self._again = self.cost.curve, line.again
                case Answered(record=record) if record.status == "ok" and record.prefill_s > 0 and curve is not None:
                    left = record.prompt_tokens - record.cached_tokens
                    self._answered(record, curve.seconds(left, record.cached_tokens))

    def _answered(self, record: RequestRecord, foretold: float) -> None:
        left, spent, held_out = record.prompt_tokens - record.cached_tokens, record.prefill_s, record.held_out
        factor, low, high = self.cost.outlook(record.prompt_tokens)
        saving = self.cost.saved(record.prompt_tokens, record.cached_tokens)
        self.cost.check(left, foretold, spent, held_out=held_out is not None)
        if held_out is not None and self._anew:
            held_out = HeldOut(spent, foretold * factor, foretold * low, foretold * high)
        if held_out is not None:
            self.held_out.append(held_out)
            self._whole = spent
        elif self._again and self._whole is not None and record.cached_tokens:
            estimate = saving.seconds, saving.below, saving.above
            if not self._anew:
                estimate = record.saved_prefill_s, record.saved_below_s, record.saved_above_s
            self.pairs.append(Pair(self._whole - spent, *estimate))
        if not self._again:
            self.requests += 1
            self.prompt_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens


def figures(replay: Replay) -> dict[str, Any]:
    """What is printed, seconds and fractions of 1."""
    held_out, pairs = replay.held_out, replay.pairs
    found: dict[str, Any] = {
        "requests": replay.requests,
        "token_hit_rate": replay.cached_tokens / replay.prompt_tokens if replay.prompt_tokens else None,
        "held_out": len(held_out),
        "measured_prefill_s": sum(one.measured for one in held_out),
        "estimated_prefill_s": sum(one.estimated for one in held_out),
        "median_error": None,
        "coverage": None,
        "curve": replay.cost.coefficients,
        "median_error_met": False,
        "coverage_met": False,
    }
    if held_out:
        error = statistics.median(abs(one.estimated / one.measured - 1) for one in held_out)
        coverage = statistics.mean(one.low <= one.measured <= one.high for one in held_out)
        found |= {"median_error": error, "coverage": coverage}
        found |= {"median_error_met": error <= MOST_ERROR, "coverage_met": COVERAGE[0] <= coverage <= COVERAGE[1]}
    if pairs:
        found["sent_again"] = {
            "requests": len(pairs),
            "measured_saved_s": sum(pair.measured for pair in pairs),
            "estimated_saved_s": sum(pair.estimated for pair in pairs),
            "coverage": statistics.mean(
                pair.estimated - pair.below <= pair.measured <= pair.estimated + pair.above for pair in pairs
            ),
        }
    return found


async def measure(arguments: argparse.Namespace, records: Records) -> None:
    """Send the log, and keep what happens."""
    folder = arguments.folder
    config = log_config(
        folder, model=arguments.model, kv_blocks=arguments.kv_blocks, savings__holdout=arguments.holdout
    )
    configure_logging(config.server.log_level)
    random.seed(arguments.seed)  # draws who is held out
    gateway = configured_gateway(config, fetch_model(model_spec(config.engine)))
    for replica in gateway.replicas.values():
        replica.observe(records)
    bodies = read_bodies(folder, requests=arguments.requests, k=arguments.k, model=gateway.model)
    async with serving(gateway) as url, Client(url) as client:
        await gateway.wait_ready(600)
        deadline = time.monotonic() + arguments.seconds
        with progress_bar(MofNCompleteColumn()) as progress:
            task = progress.add_task("requests", total=len(bodies))
            for body in bodies:
                if time.monotonic() > deadline:
                    break
                records.write(Sent())
                record = await _send(gateway, client, body)
                records.write(Answered(record))
                while arguments.again and record.held_out is not None:  # one of them in five is held out once more
                    records.write(Sent(again=True))
                    record = await _send(gateway, client, body)
                    records.write(Answered(record))
                progress.advance(task)


async def _send(gateway: Gateway, client: Client, body: dict[str, Any]) -> RequestRecord:
    """The account of one request."""
    known = gateway.statistics.requests_ever
    outcome = await client.complete(body)
    if gateway.statistics.requests_ever == known:  # refused; an answer is counted before its end is sent
        raise RuntimeError(outcome.failure)
    if outcome.failure:
        NOTES.print(outcome.failure, markup=False)
    return gateway.statistics.latest[0]


def _tell(found: dict[str, Any]) -> None:
    if not found["held_out"]:
        print(f"{found['requests']} requests, none kept from the cache: nothing to compare.")
        return
    met = {True: "met", False: "MISSED"}
    print(f"{found['requests']} requests, {found['token_hit_rate']:.1%} of their tokens from the cache")
    print(f"{found['held_out']} kept from it: {found['measured_prefill_s']:.1f} s of prefill measured, ", end="")
    print(f"{found['estimated_prefill_s']:.1f} s foretold")
    print(f"median error {found['median_error']:.1%} (at most {MOST_ERROR:.0%}): {met[found['median_error_met']]}")
    low, high = COVERAGE
    print(f"within the interval {found['coverage']:.1%} ({low:.0%} to {high:.0%}): {met[found['coverage_met']]}")
    if again := found.get("sent_again"):
        print(
            f"{again['requests']} of them sent again: {again['measured_saved_s']:.1f} s saved by two measurements, ",
            end="",
        )
        print(f"{again['estimated_saved_s']:.1f} s estimated; {again['coverage']:.1%} within their intervals")


def main() -> None:
    """Parse, measure or read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the log's folder, or the one it is in as rag_xquad_en")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3600.0, help="send no more after that time")
    parser.add_argument("--holdout", type=float, default=0.2, help="share kept from the cache")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--k", type=int, default=5, help="documents per request")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--kv-blocks", type=int, default=4096)
    parser.add_argument("--again", action="store_true", help="send what was held out once more, through the cache")
    parser.add_argument("--records", type=Path, help="file for what is measured (default: one in the temporary folder)")
    parser.add_argument("--replay", type=Path, metavar="RECORDS", help="measure nothing, go through this file")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    if (arguments.folder is None) == (arguments.replay is None):
        parser.error("give either the log's folder or --replay")
    path = arguments.replay
    if path is not None and not path.is_file():
        parser.error(f"there is no file {path}")
    if path is None:
        folders = arguments.folder, arguments.folder / "rag_xquad_en"
        arguments.folder = next((folder for folder in folders if (folder / "corpus.jsonl").is_file()), None)
        if arguments.folder is None:
            parser.error(f"there is no corpus.jsonl in {folders[0]}")
        path = arguments.records or Path(tempfile.mkdtemp(prefix="headstart-")) / "saved_time.jsonl"
        NOTES.print(f"records: {path}", markup=False)
        with path.open("wb") as file, contextlib.suppress(KeyboardInterrupt):
            run(measure(arguments, Records(file)))
    replay = Replay(anew=arguments.replay is not None)
    replay.follow(read_records(path))
    found = figures(replay)
    if arguments.json:
        print_json(found)
    else:
        _tell(found)


if __name__ == "__main__":
    main()
