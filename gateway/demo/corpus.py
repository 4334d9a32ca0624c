"""The demo's knowledge base: the documentation that comes with the user's own Python.

Nothing is downloaded or shipped: the passages are the docstrings of the standard library's modules, classes, functions
and methods, read with ``inspect``. The list of modules is fixed and leaves out what has side effects on import, needs a
screen or was removed in a later Python, so that 3.11 and later give nearly the same corpus.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Final

import msgspec

from gateway.errors import HeadstartError

__all__ = ["CorpusError", "Passage", "read_corpus", "split_text"]

MODULES: Final = """
builtins abc argparse array ast asyncio base64 binascii bisect bz2 calendar cmath code codecs collections
collections.abc compileall concurrent.futures configparser contextlib contextvars copy csv ctypes dataclasses
datetime decimal difflib dis doctest email.message email.utils enum errno fileinput filecmp fnmatch fractions
functools gc getopt getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookies
http.server imaplib importlib importlib.resources inspect io ipaddress itertools json keyword linecache locale
logging logging.config logging.handlers lzma marshal math mimetypes multiprocessing multiprocessing.pool numbers
operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform plistlib poplib pprint profile pstats
py_compile queue random re reprlib runpy sched secrets select selectors shelve shlex shutil signal smtplib socket
socketserver sqlite3 ssl statistics string struct subprocess symtable sys sysconfig tarfile tempfile textwrap
threading time timeit tokenize tomllib trace traceback tracemalloc types typing unicodedata unittest unittest.mock
urllib.parse urllib.request urllib.robotparser uuid venv warnings wave weakref webbrowser xml.dom.minidom
xml.etree.ElementTree xmlrpc.client zipapp zipfile zipimport zlib zoneinfo
"""

MIN_CHARACTERS: Final = 150
"""A shorter text is a remark, not an answer; about 40 tokens."""

MAX_CHARACTERS: Final = 500
"""Longer texts are split between paragraphs; 120 tokens of prose, up to 250 of symbols."""

MIN_PASSAGES: Final = 600
"""Fewer means a Python without its documentation: 3.11 has about 1,700."""

WITH_METHODS: Final = frozenset({"str", "list", "dict", "set", "int", "float", "pathlib.Path", "pathlib.PurePath"})
"""Classes that people ask about method by method; elsewhere the class's own text says what it is for."""

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


class CorpusError(HeadstartError):
    """This Python carries too little documentation to ask questions about."""


class Passage(msgspec.Struct, frozen=True):
    """One retrievable piece of documentation.

    ``id`` is the dotted name of what is described, with ``#2`` and so on for the further parts of a long text.
    ``title`` is the name with its signature where it has one.
    """

    id: str
    title: str
    text: str


def split_text(text: str, limit: int = MAX_CHARACTERS, least: int = MIN_CHARACTERS) -> list[str]:
    """Split ``text`` between paragraphs (then lines, then anywhere) into parts of at most ``limit`` characters.

    Parts shorter than ``least`` characters are dropped: they would be retrieved for their lack of other words.
    """
    parts: list[str] = []
    current = ""
    for piece in _pieces(text, limit):
        joined = f"{current}\n\n{piece}" if current else piece
        if len(joined) <= limit:
            current = joined
        else:
            parts.append(current)
            current = piece
    parts.append(current)
    return [part for part in parts if len(part) >= least]


def _pieces(text: str, limit: int) -> Iterator[str]:
    for paragraph in re.split(r"\n[ \t]*\n", text.strip()):
        rest = paragraph.strip("\n")
        while len(rest) > limit:
            cut = rest.rfind("\n", 1, limit)
            cut = cut if cut > 0 else limit
            yield rest[:cut]
            rest = rest[cut:].lstrip("\n")
        if rest.strip():
            yield rest


def read_corpus() -> list[Passage]:
    """The passages of this Python, sorted by id; the same list at each call and in each process.

    Raises:
        CorpusError: When docstrings were stripped (``python -OO``, ``PYTHONOPTIMIZE=2``) or are missing.
    """
    passages: list[Passage] = []
    seen: set[str] = set()  # texts: a class that inherits its base's text describes nothing new
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecated member is still documented
        for dotted, thing in _documented():
            text = _ADDRESS.sub("", inspect.getdoc(thing) or "")
            if text in seen:
                continue
            seen.add(text)
            for number, part in enumerate(split_text(text), start=1):
                key = dotted if number == 1 else f"{dotted}#{number}"
                passages.append(Passage(id=key, title=_title(dotted, thing), text=part))
    if sys.flags.optimize >= 2 or len(passages) < MIN_PASSAGES:
        raise CorpusError(
            f"this Python carries only {len(passages)} passages of documentation; run it with docstrings "
            "(without -OO and without PYTHONOPTIMIZE=2)"
        )
    return sorted(passages, key=lambda passage: passage.id)


def _documented() -> Iterator[tuple[str, object]]:
    """Each module, its public classes and functions, and the methods of the most used classes, with dotted names."""
    for name in MODULES.split():
        try:
            module = importlib.import_module(name)
        except ImportError:  # another platform, or a Python built without an optional part
            continue
        yield name, module
        root = name.partition(".")[0]
        public = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
        for member in sorted(public):
            thing = getattr(module, member, None)
            if not (inspect.isclass(thing) or inspect.isroutine(thing)) or not _belongs(thing, member, root):
                continue
            dotted = member if name == "builtins" else f"{name}.{member}"
            yield dotted, thing
            if dotted in WITH_METHODS:
                for key, value in sorted(vars(thing).items()):
                    if not key.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
                        yield f"{dotted}.{key}", getattr(thing, key)


def _belongs(thing: object, member: str, root: str) -> bool:
    """Whether ``thing`` is of package ``root`` and no alias: modules also export what they borrowed elsewhere."""
    origin = str(getattr(thing, "__module__", None) or root).partition(".")[0].lstrip("_")
    return origin in _IMPLEMENTED_IN.get(root, (root,)) and getattr(thing, "__name__", member) == member


_IMPLEMENTED_IN: Final = {
    "os": ("os", "posix", "nt", "posixpath", "ntpath", "genericpath"),
    "builtins": ("builtins", "io"),
}


def _title(dotted: str, thing: object) -> str:
    """``json.dumps(obj, *, skipkeys=False, …)``, or the bare name where no signature is known."""
    if inspect.ismodule(thing):
        return f"{dotted} module"
    if not callable(thing):
        return dotted
    try:
        signature = _ADDRESS.sub("", str(inspect.signature(thing)))
    except (ValueError, TypeError):
        return dotted
    return dotted + signature if len(signature) <= 100 else dotted
