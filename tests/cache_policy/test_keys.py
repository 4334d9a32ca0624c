from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import cache_policy
from cache_policy.keys import KEY_BYTES, Namespace, chain_keys, derive_root, token_bytes, token_list

SOURCE = Path(cache_policy.__file__).parents[1]
SECRET = b"s1"
ROOT = derive_root(SECRET, Namespace(tenant="t", model="m", weights="w"))

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)
texts = st.text(max_size=6)
namespaces = st.builds(Namespace, tenant=texts, model=texts, weights=texts, salt=texts, adapter=texts)


def tok(start: int, count: int) -> list[int]:
    return list(range(100 + start, 100 + start + count))


def keys(token_ids: list[int], *, secret: bytes = SECRET, tenant: str = "t", **fields: str) -> list[bytes]:
    return chain_keys(derive_root(secret, Namespace(tenant=tenant, model="m", weights="w", **fields)), token_ids, 16)


def run_python(code: str, path: list[Path], **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONHASHSEED", "PYTHONPATH")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- stable inside a deployment, unknown outside ----------------------------------------------------------


def test_a1_keys_are_equal_in_every_process_with_the_same_secret():
    code = (
        "from cache_policy.keys import Namespace, chain_keys, derive_root\n"
        "root = derive_root(b's1', Namespace(tenant='t', model='m', weights='w'))\n"
        "print(*(key.hex() for key in chain_keys(root, list(range(100, 164)), 16)))"
    )
    here = [key.hex() for key in keys(tok(0, 64))]
    assert len(set(here)) == 4
    for environment in ({"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "42"}, {}):
        other = run_python(code, [SOURCE], **environment)
        assert other.stdout.split() == here, other.stderr


def test_a1_another_secret_changes_every_key():
    assert not set(keys(tok(0, 64))) & set(keys(tok(0, 64), secret=b"s2"))


def test_a1_an_empty_secret_is_refused():
    with pytest.raises(ValueError, match="secret is empty"):
        derive_root(b"", Namespace(tenant="t", model="m", weights="w"))


def test_every_byte_of_a_long_secret_counts():
    assert keys(tok(0, 16), secret=b"x" * 100 + b"1") != keys(tok(0, 16), secret=b"x" * 100 + b"2")


def test_keys_do_not_change_between_releases():
    """Gateways and engines of two releases run side by side during an upgrade: these are the keys of both."""
    root = derive_root(b"secret", Namespace(tenant="acme", model="m", weights="w1", salt="é", adapter="a"))
    assert root.hex() == "c47dfd21e13b5d10173fe71aea69d214"
    assert chain_keys(root, tok(0, 16), 16)[0].hex() == "1a4e06c9ad071ed35444959ece7ceb91"


# --- namespaces -------------------------------------------------------------------------------------------


def test_a4_fields_are_framed():
    chains = [
        keys(tok(0, 32), tenant="org_1", salt="2345"),
        keys(tok(0, 32), tenant="org_12345", salt=""),
        keys(tok(0, 32), adapter="S"),
        keys(tok(0, 32), salt="S"),
    ]
    assert len({key for chain in chains for key in chain}) == 8


@given(namespaces, namespaces)
def test_roots_are_equal_exactly_when_namespaces_are(one, other):
    assert (derive_root(SECRET, one) == derive_root(SECRET, other)) == (one == other)


@pytest.mark.parametrize("field", Namespace.__struct_fields__)
def test_every_field_of_the_namespace_counts(field):
    fields = dict.fromkeys(Namespace.__struct_fields__, "x")
    assert derive_root(SECRET, Namespace(**fields)) != derive_root(SECRET, Namespace(**fields | {field: "y"}))


def test_a_salt_that_is_no_valid_text_still_has_a_root():
    roots = {derive_root(SECRET, Namespace("t", "m", "w", salt=salt)) for salt in ("\ud800", "\udfff", "?")}
    assert len(roots) == 3


# --- chains -----------------------------------------------------------------------------------------------


def test_a_key_is_the_hash_of_parent_and_little_endian_tokens():
    first = xxhash.xxh3_128_digest(ROOT + struct.pack("<4I", 1, 2, 3, 2**32 - 1))
    second = xxhash.xxh3_128_digest(first + struct.pack("<4I", 5, 6, 7, 8))
    assert chain_keys(ROOT, [1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9], 4) == [first, second]
    assert len(ROOT) == len(first) == KEY_BYTES


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (33, 2)])
def test_only_full_blocks_have_keys(tokens, blocks):
    assert len(chain_keys(ROOT, tok(0, tokens), 16)) == blocks


def test_a6_the_same_tokens_after_another_prefix_have_another_key():
    one = keys([*tok(0, 16), *tok(900, 16), 7])
    other = keys([*tok(50, 16), *tok(900, 16), 7])
    assert not set(one) & set(other)


@given(token_lists, token_lists, token_lists)
def test_two_prompts_share_exactly_the_keys_of_their_common_full_blocks(shared, one, other):
    left, right = shared + one, shared + other
    pairs = zip(left, right, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    equal = [a == b for a, b in zip(chain_keys(ROOT, left, 4), chain_keys(ROOT, right, 4), strict=False)]
    assert equal == [True] * (common // 4) + [False] * (len(equal) - common // 4)


@given(token_lists, st.integers(0, 17))
def test_a_chain_continues_from_any_of_its_keys(token_ids, blocks):
    whole = chain_keys(ROOT, token_ids, 4)
    blocks = min(blocks, len(whole))
    parent = whole[blocks - 1] if blocks else ROOT
    assert whole[:blocks] + chain_keys(parent, token_ids[4 * blocks :], 4) == whole


def test_a2_a_colliding_hash_can_be_forced_so_that_owners_prove_that_they_verify():
    def collide(parent: bytes, tokens: bytes) -> bytes:
        return b"\x07" * KEY_BYTES

    assert chain_keys(ROOT, tok(0, 33), 16, collide) == chain_keys(ROOT, tok(5000, 33), 16, collide)


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_block_has_at_least_one_token(block_size):
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        chain_keys(ROOT, tok(0, 16), block_size)


@pytest.mark.parametrize(
    ("token_ids", "error"), [([-1], OverflowError), ([2**32], OverflowError), ([1.0], TypeError), (["1"], TypeError)]
)
def test_what_is_no_token_id_is_an_error_and_never_another_token(token_ids, error):
    with pytest.raises(error):
        token_bytes(token_ids)


def test_tokens_are_little_endian_on_every_machine_and_come_back():
    ids = [0, 1, 2**32 - 1]
    assert token_bytes(ids) == bytes(4) + b"\1\0\0\0" + b"\xff" * 4
    assert token_list(token_bytes(ids)) == ids
    with pytest.raises(ValueError, match="multiple of item size"):
        token_list(b"\1\0\0")


# --- start-up ---------------------------------------------------------------------------------------------


def test_a8_a_missing_hash_library_stops_the_start_and_is_named(tmp_path):
    (tmp_path / "xxhash.py").write_text("raise ImportError('not here')\n")
    started = run_python("import cache_policy.keys", [tmp_path, SOURCE])
    assert started.returncode != 0
    assert "'xxhash'" in started.stderr
    assert "pip install xxhash" in started.stderr
