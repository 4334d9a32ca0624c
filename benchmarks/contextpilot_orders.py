"""Run by the Python that has ContextPilot installed: order contexts one after the other, as it does online.

Standard input has one JSON array per line, ``[index, [document, …]]``: contexts of one ``index`` share an index of
ContextPilot. Standard output gets one line each: ``[seconds, [document, …]]``, or the error as a string.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections import defaultdict

from contextpilot.server.live_index import ContextPilot  # type: ignore[import-not-found]

indexes: defaultdict[str, ContextPilot] = defaultdict(lambda: ContextPilot(use_gpu=False))
answers = sys.stdout
for line in sys.stdin:
    index, context = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        pilot = indexes[index]
        started = time.process_time()
        try:
            (ordered,), _ = pilot.reorder(context)
        except Exception as error:
            answers.write(json.dumps(f"{type(error).__name__}: {error}") + "\n")
            continue
        seconds = time.process_time() - started
    answers.write(json.dumps([seconds, ordered]) + "\n")
    answers.flush()
