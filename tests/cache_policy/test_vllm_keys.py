"""Against what vLLM 0.32 gave for the same blocks (``vllm/utils/hashing.py``, ``v1/core/kv_cache_utils.py``)."""

from __future__ import annotations

import pytest

from cache_policy.vllm_keys import DEFAULT_SEED, VllmHash, event_hash, vllm_block_hashes

TOKENS = [1, 2, 300, 70000, 5, 6, 7, 8, 9]
SALT = "0" * 32
KNOWN: list[tuple[VllmHash, str | None, str, list[str], list[int]]] = [
    (
        "xxhash_cbor",
        None,
        "0",
        ["22b67532b1db7baa402617a23c44c421", "02e1c85427b29b723012ff3a8f96c585"],
        [4622408053105673249, 3464111690383541637],
    ),
    (
        "xxhash_cbor",
        SALT,
        "0",
        ["48cb57be8f1a31ddeee1649abd5cf717", "3bb2d642636c676028f39d77c8389f7f"],
        [17213149866551473943, 2950875318643629951],
    ),
    (
        "sha256_cbor",
        None,
        DEFAULT_SEED,
        [
            "67516cd611fd0d7e4c5c7f6fdbf4d93a304496db502c69895dc6a82deea8ae72",
            "d5818499227dc61850d6f5ee43963e7875c219ecb469b5fc1c47621459df4408",
        ],
        [6757273206147034738, 2037705195955110920],
    ),
    (
        "sha256_cbor",
        SALT,
        DEFAULT_SEED,
        [
            "ac2faccaedd0c51ab1a70911fb536600cd7a41ec9d5008e1439aed6159818083",
            "708a47223634e67413c74f4db1fcf9575c5d56ddcafb7a817808e32084cf9a9b",
        ],
        [4871466949323882627, 8649412813171694235],
    ),
    (
        "sha256",
        SALT,
        DEFAULT_SEED,
        [
            "296e463ba02217e03c2280f9998c303187be28d0cf49e8906be91f04c1890dcc",
            "74712d22fae4415f5aaab0f17b2fc5d993c2f93141a1424171c6599731aeb05d",
        ],
        [7775780336919186892, 8198338677583032413],
    ),
    (
        "xxhash",
        SALT,
        "0",
        ["c4cdfaf7882425f9bfa37c9ad8071fc5", "7ed3568e8bd4b3f0adddf046875c52e9"],
        [13809017886939226053, 12528433924123939561],
    ),
]


@pytest.mark.parametrize(("algorithm", "salt", "seed", "hashes", "names"), KNOWN)
def test_block_hashes_are_vllms(
    algorithm: VllmHash, salt: str | None, seed: str, hashes: list[str], names: list[int]
) -> None:
    computed = vllm_block_hashes(TOKENS, 4, algorithm, seed=seed, salt=salt)
    assert [block_hash.hex() for block_hash in computed] == hashes
    assert [event_hash(block_hash) for block_hash in computed] == names


def test_only_full_blocks_have_a_hash_and_their_size_is_positive() -> None:
    assert vllm_block_hashes(TOKENS, 10, "sha256_cbor") == []
    assert len(vllm_block_hashes(TOKENS, 9, "sha256_cbor")) == 1
    with pytest.raises(ValueError, match="at least 1"):
        vllm_block_hashes(TOKENS, 0, "sha256_cbor")
