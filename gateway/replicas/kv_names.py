"""How an engine names the blocks of a prompt: found out from the names that its cache events have told."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final, get_args

from cache_policy.vllm_keys import DEFAULT_SEED, VllmHash, event_hash, vllm_block_hashes
from gateway.replicas.kv_messages import EngineHash

__all__ = ["KvNames"]

_RULES: Final[tuple[tuple[VllmHash, str], ...]] = (
    ("sha256", DEFAULT_SEED),
    ("sha256_cbor", DEFAULT_SEED),
    *((algorithm, "0") for algorithm in get_args(VllmHash)),
)
"""Hash function and seed: vLLM's defaults, and with ``PYTHONHASHSEED=0``."""


class KvNames:
    """The rule by which one engine names blocks, once it is known. Owned by the engine's ``KvBlocks``.

    An engine with a random seed, or of another kind than vLLM, has a rule that is never found.
    """

    __slots__ = ("_rule", "_whole")

    def __init__(self) -> None:
        self._rule: tuple[VllmHash, str] | None = None
        self._whole = False  # whether events tell hashes instead of their last 8 bytes

    @property
    def known(self) -> bool:
        """Whether the rule is known."""
        return self._rule is not None

    def find(self, token_ids: Sequence[int], block_size: int, salt: str, told: Container[EngineHash]) -> bool:
        """Try which rule gives this prompt a name that was ``told``; whether the rule is known now."""
        for algorithm, seed in _RULES if self._rule is None else ():
            hashes = vllm_block_hashes(token_ids, block_size, algorithm, seed=seed, salt=salt)
            for block_hash in hashes:
                if event_hash(block_hash) in told or block_hash in told:
                    self._rule, self._whole = (algorithm, seed), block_hash in told
                    return True
        return self.known

    def of(self, token_ids: Sequence[int], block_size: int, salt: str) -> list[EngineHash]:
        """The names of a prompt's full blocks; of none while the rule is not known."""
        if self._rule is None:
            return []
        algorithm, seed = self._rule
        hashes = vllm_block_hashes(token_ids, block_size, algorithm, seed=seed, salt=salt)
        return [*hashes] if self._whole else [*map(event_hash, hashes)]
