"""The Triton kernels compute what the reference does, in float32 and float16, in Triton's interpreter.

bfloat16 is left out: the interpreter's own product of bfloat16 matrices is wrong.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("triton_interpreter", HERE / "triton_interpreter.py")
assert SPEC is not None
assert SPEC.loader is not None
interpreter = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = interpreter
SPEC.loader.exec_module(interpreter)
Case, Answer = interpreter.Case, interpreter.Answer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it exists for Linux only)"
)

TOLERANCE = {"float32": 1e-5, "float16": 5e-3}

# Both edges of a block, an empty prefix, decodes, and prefills of one and of several tiles.
MIXED = ((0, 23), (16, 1), (31, 16), (32, 7), (45, 1), (15, 1))

CASES = [
    Case("mixed", MIXED),
    Case("mixed-wide", MIXED, wide=True),
    Case("mixed-half", MIXED, dtype="float16"),
    Case("first-token", ((0, 1),)),
    Case("one-block", ((0, 16), (16, 16)), wide=True),
    Case("group-1", ((5, 20), (40, 1)), heads=(3, 3)),
    Case("group-3", ((5, 9), (40, 1)), heads=(9, 3)),
    Case("group-3-wide", ((5, 30), (40, 1)), heads=(9, 3), wide=True),
    Case("group-4-half", ((30, 40), (17, 1)), heads=(8, 2), dtype="float16"),
    Case("group-8", ((33, 3), (60, 1)), heads=(8, 1)),
    Case("group-24-in-two-blocks-of-heads", ((20, 1), (3, 2)), heads=(24, 1)),
    Case("window-1", ((40, 1), (3, 12)), window=1),
    Case("window-within-block", ((37, 2), (0, 20)), window=5),
    Case("window-over-blocks", ((70, 1), (40, 50)), window=33, wide=True),
    Case("window-longer-than-context", ((20, 4),), window=999),
    Case("window-half", ((70, 1), (40, 30)), window=20, dtype="float16"),
    Case("freed-blocks", ((90, 1), (70, 25)), window=20, stale=True),
    Case("freed-blocks-wide", ((70, 25),), window=20, stale=True, wide=True),
    Case("softcap", ((20, 1), (6, 12)), softcap=2.0),
    Case("softcap-wide", ((6, 30),), softcap=2.0, wide=True),
    Case("sinks", ((20, 1), (6, 12)), heads=(8, 2), sinks=True),
    Case("sinks-wide-half", ((6, 40),), heads=(8, 2), sinks=True, dtype="float16"),
    Case("everything", ((20, 1), (50, 9)), heads=(6, 2), window=17, softcap=2.0, sinks=True),
    Case("sliced", ((1030, 1), (511, 1), (512, 1), (1020, 6))),
    Case("sliced-window", ((1030, 1), (600, 1)), window=150),
    Case("sliced-everything", ((1100, 3),), heads=(4, 2), window=700, softcap=2.0, sinks=True),
    Case("dim-80", ((20, 5),), dims=(80, 80)),
    Case("dim-96-half", ((20, 40),), dims=(96, 96), dtype="float16"),
    Case("dim-128", ((20, 5), (40, 1)), dims=(128, 128)),
    Case("dim-128-half", ((20, 40), (40, 1)), dims=(128, 128), dtype="float16"),
    Case("dim-16", ((20, 5),), dims=(16, 16)),
    Case("dim-256", ((20, 5),), dims=(256, 256)),
    Case("dim-256-half", ((20, 40),), dims=(256, 256), dtype="float16"),
    Case("keys-wider-than-values", ((20, 5), (33, 1)), dims=(96, 64)),
    Case("block-size-8", ((13, 9), (24, 1)), block_size=8),
    Case("block-size-32", ((31, 2), (64, 1)), block_size=32),
    Case("block-size-128", ((127, 2), (130, 1)), block_size=128),
]


@pytest.fixture(scope="module")
def answer() -> Iterator[Callable[[Case], Answer]]:
    """Ask the interpreter's process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), *sys.path))}
    with subprocess.Popen(
        [sys.executable, str(HERE / "triton_interpreter.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(case: Case) -> Answer:
            requests.write(msgspec.json.encode(case) + b"\n")
            requests.flush()
            line = answers.readline()
            assert line, "the interpreter's process ended; its error is on standard error"
            return msgspec.json.decode(line, type=Answer)

        yield ask
        requests.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_equal_the_reference(case: Case, answer: Callable[[Case], Answer]) -> None:
    got = answer(case)
    assert got.stored, "the pool does not hold the new K and V"
    assert got.error < TOLERANCE[case.dtype]
    if case.softcap or case.sinks or (case.window and case.window < 500):
        assert got.plain > 0.2, "the case would pass without the feature"


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_a_sequence_is_rounded_alike_in_any_batch(wide: bool, answer: Callable[[Case], Answer]) -> None:
    sequences = ((520, 1), (3, 21), (40, 1), (0, 17))
    assert answer(Case("alone", sequences, heads=(3, 1), alone=True, wide=wide)).same_alone
