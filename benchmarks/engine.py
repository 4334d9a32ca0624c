"""Measure the engine: against what this machine can do at all, and side by side with other servers.

    python benchmarks/engine.py                                  # all parts, peers that are installed; README.md
    python benchmarks/engine.py --only kernel --rounds 1         # the engine alone, against the machine's limits
    python benchmarks/engine.py --vllm ~/vllm/bin/python --json  # one JSON value on stdout, the rest on stderr

Every figure and every limit of a line is measured in the same run, the competitors in turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# A script's folder is searched first, and there this file would be taken for the package of the same name.
sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]

from benchmarks.side_by_side.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(__doc__))
