"""Reasons as everybody may read them: where things are, on the network and on disk, is for the operator to know."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["redacted"]

_ADDRESS: Final = re.compile(r"\b[a-z0-9+.-]+://[^\s,;)'\"]*[^\s,;)'\":.]", re.IGNORECASE)
"""A URL in the words of a reason, without the punctuation behind it."""

_PATH: Final = re.compile(r"'~?/[^']*'|\"~?/[^\"]*\"|(?<![\w.~/])~?/[^\s,;()'\"]*[^\s,;()'\":.]")
"""An absolute path, in quotes or up to the next blank, without the punctuation behind it."""

_ROUTE: Final = re.compile(r"/(?:v1|admin)/[\w/{}-]+|/(?:health|ready|metrics|props|version|tokenize|detokenize)")
"""What looks like a path, but is a route of ours or of a server's."""


def redacted(words: str) -> str:
    """``words`` without addresses of servers and paths of files."""
    return _PATH.sub(_without_path, _ADDRESS.sub("the server", words))


def _without_path(found: re.Match[str]) -> str:
    return found[0] if _ROUTE.fullmatch(found[0]) else "a local path"
