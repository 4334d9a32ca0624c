"""What the log looks like, and what never gets into it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

SCRIPT = textwrap.dedent("""
    import logging
    import structlog
    early = structlog.get_logger("headstart.early")
    from gateway.logs import configure_logging
    configure_logging("info")
    early.info("told", number=3)
    early.debug("not told")
    logging.getLogger("uvicorn.error").info("a library's chatter")
    logging.getLogger("engine.core").warning("a library's worry")
    try:
        {}["ZEBRA-7731"]
    except KeyError as error:
        early.error("ours failed", exc_info=error)
        logging.getLogger("uvicorn.error").error("theirs failed", exc_info=True)
""")


def _log_lines() -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert run.stdout == "", "the log belongs on stderr"
    assert "ZEBRA" not in run.stderr
    return [json.loads(line) for line in run.stderr.splitlines()]


def test_lines_are_json_with_level_and_place_and_exceptions_keep_their_message_to_themselves() -> None:
    told, worry, ours, theirs = _log_lines()
    assert told["event"] == "told"
    assert (told["number"], told["level"], told["logger"]) == (3, "info", "headstart.early")
    assert worry["event"] == "a library's worry"
    for line in (ours, theirs):
        assert line["level"] == "error"
        assert "KeyError" in line["exception"]
