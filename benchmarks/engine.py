"""Measure the engine: against what this machine can do at all, and side by side with other servers.

    python -m benchmarks.engine                                  # all parts; benchmarks/README.md
    python -m benchmarks.engine --only kernel --rounds 1         # the engine alone, against the machine's limits
    python -m benchmarks.engine --vllm ~/vllm/bin/python --json  # one JSON value on stdout, the rest on stderr

Every figure and every limit is measured in the same run, the servers in turns.
"""

from __future__ import annotations

import sys

from benchmarks.side_by_side.command import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
