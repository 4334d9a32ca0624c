"""What everybody may read of a reason: no address, no path, and all else as it was."""

from __future__ import annotations

import pytest

from gateway.redaction import redacted


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("http://10.0.0.7:8000/v1 cannot be reached: it", "the server cannot be reached: it"),
        ("no engine answers on tcp://[fd00::7]:9000 (refused)", "no engine answers on the server (refused)"),
        ("traffic is not recorded: /srv/rec: disk full", "traffic is not recorded: a local path: disk full"),
        ("/models is not complete", "a local path is not complete"),
        ("it is in '/srv/my models/x', or \"/srv/b c\".", "it is in a local path, or a local path."),
        ("see ~/models/x.gguf.", "see a local path."),
        ("(/srv/a/b), /srv/c; /srv/d", "(a local path), a local path; a local path"),
    ],
)
def test_addresses_and_paths_are_taken_out(words: str, told: str) -> None:
    assert redacted(words) == told


@pytest.mark.parametrize(
    "words",
    [
        "it answers 503 to /health, as servers do that load their model",
        "its list in /v1/models is empty",
        "2 pins are in force nowhere: GET /admin/pins says why",
        "it offers no /tokenize, so that its tokenizer could not be checked",
        "give with --model the folder of the model that it serves, 'org/model'",
        "does not serve org/model but 'a'; CPU/GPU, and/or, 3 / 4",
    ],
)
def test_routes_and_names_stay(words: str) -> None:
    assert redacted(words) == words
