"""How much of what declared templates give is reached by learned ones, on a request log and an infinite cache.

    python -m benchmarks.learning DATA/rag_xquad_en

The folder holds ``corpus.jsonl``, ``templates.json`` and ``requests.jsonl.gz`` (see its README). Every request is a
chat body whose system message is filled in as its application does, and walks the gateway's own request path up to its
block keys. No template is registered, but for the pass ``declared``. ``offline`` learns from the whole log before it
replays it, ``live`` learns from each request after it was planned; the log's four templates share one source. Token hit
rates are fractions of 1, over all requests and from request 201 on; ``observe_us`` is the processor time that a request
takes to learn from. Prints one JSON object, and needs no engine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Set
from typing import Any, Final

from rich.progress import MofNCompleteColumn

from benchmarks.reference_log import log_parser, read_log
from engine.wire import EngineInfo
from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.learning.proposals import TemplateProposals
from gateway.canonical.pipeline import Canonicalizer
from gateway.canonical.registry import TemplateRegistry
from gateway.cli.terminal import fetch_model, print_json, progress_bar
from gateway.config import DEFAULT_TENANT, CanonicalConfig, TemplateConfig
from gateway.plan import Caller
from gateway.prompt import PromptRenderer
from gateway.request_path import RequestPath
from gateway.routing.candidate import Candidate
from gateway.schema import ChatRequest

WARM: Final = 200
"""Requests after which ``live`` is counted."""

BLOCK_SIZE: Final = 16
CALLER: Final = Caller(DEFAULT_TENANT)


class Boundless:
    """One replica that keeps every block it was ever sent (``gateway.request_path.Fleet``)."""

    def __init__(self) -> None:
        self.resident: set[bytes] = set()
        self._info = EngineInfo("m", "", "", "", 8192, 1, BLOCK_SIZE, "float32", "cpu", 1, (), "lru", 512)

    def candidates(self, avoid: Set[str] = frozenset()) -> list[Candidate]:
        """The replica, idle."""
        return [Candidate("replica", self._info, self.resident, 0, 0, self)]

    def seconds(self, tokens: int, context: int) -> float:
        """Prefill costs the same for every token."""
        return float(tokens)


def make_path(
    renderer: PromptRenderer, fleet: Boundless, templates: dict[str, TemplateConfig], learner: TemplateLearner | None
) -> RequestPath:
    """The gateway's request path; everything found or declared is moved."""
    return RequestPath(
        model="m",
        secret=b"benchmark",
        canonical=CanonicalConfig(hoist="apply"),
        templates=templates,
        renderer=renderer,
        router=fleet,
        learned=learner,
    )


def learn(bodies: Iterable[ChatRequest], learner: TemplateLearner) -> None:
    """Show the learner all bodies."""
    canonicalizer = Canonicalizer(CanonicalConfig(), TemplateRegistry({}, normalize=True), learner)
    for body in bodies:
        _, observation = canonicalizer.recognize(body, CALLER.tenant)
        if observation is not None:
            learner.observe(observation.source, observation.text)


def replay(
    name: str, bodies: Iterable[ChatRequest], path: RequestPath, fleet: Boundless, learner: TemplateLearner | None
) -> dict[str, Any]:
    """Token hit rates of a pass over an empty cache; with ``learner`` each request teaches it after it was planned."""
    hits, tokens, seconds = [0, 0], [0, 0], 0.0
    with progress_bar(MofNCompleteColumn()) as progress:
        for number, body in enumerate(progress.track([*bodies], description=name)):
            plan = path.plan_chat(body, CALLER)
            cached = next((at for at, key in enumerate(plan.keys) if key not in fleet.resident), len(plan.keys))
            for part in (0, 1) if number >= WARM else (0,):
                hits[part] += cached * BLOCK_SIZE
                tokens[part] += len(plan.token_ids)
            fleet.resident.update(plan.keys)
            if plan.sighting is not None:
                path.popularity.observe(plan.sighting)
            if learner is not None and plan.observation is not None:
                started = time.thread_time()
                learner.observe(plan.observation.source, plan.observation.text)
                seconds += time.thread_time() - started
    figures = {"token_hit_rate": hits[0] / tokens[0], "token_hit_rate_from_201": hits[1] / max(1, tokens[1])}
    return figures | ({"observe_us": 1e6 * seconds / (number + 1)} if learner is not None else {})


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All passes, each on a cold cache."""
    bodies, templates = read_log(arguments.folder, arguments.requests, arguments.k)
    renderer = PromptRenderer(fetch_model(arguments.model))
    figures: dict[str, Any] = {"requests": len(bodies), "k": arguments.k}
    for name in ("as_written", "declared", "offline", "live"):
        fleet = Boundless()
        learner = TemplateLearner(salt=0) if name in ("offline", "live") else None
        path = make_path(renderer, fleet, templates if name == "declared" else {}, learner)
        if learner is not None and name == "offline":
            learn(bodies, learner)
        figures[name] = replay(name, bodies, path, fleet, learner if name == "live" else None)
        if learner is not None:
            found = TemplateProposals(learner, "apply").all()
            figures[name] |= {"templates": len(found), "examined": learner.examined}
    declared = figures["declared"]
    figures["offline_of_declared"] = figures["offline"]["token_hit_rate"] / declared["token_hit_rate"]
    figures["live_of_declared_from_201"] = (
        figures["live"]["token_hit_rate_from_201"] / declared["token_hit_rate_from_201"]
    )
    return figures


def main() -> None:
    """Parse, measure, print."""
    print_json(measure(log_parser(__doc__).parse_args()))


if __name__ == "__main__":
    main()
