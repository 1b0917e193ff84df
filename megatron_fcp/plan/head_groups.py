"""Heads in groups: what the reshuffle layout brings in, attends to and takes home one group after the other.

Heads do not meet in attention, so a group can be attended to while the next one is on its way in and the one before on
its way home, whatever the documents are.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fcp.config import HEAD_GROUPS


@dataclass(frozen=True)
class HeadGroup:
    """Consecutive heads: ``q_start:q_stop`` of the queries, and the KV heads that they attend to."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def q(self) -> slice:
        """Heads of queries, outputs and their gradients."""
        return slice(self.q_start, self.q_stop)

    @property
    def kv(self) -> slice:
        """Heads of keys, values and their gradients."""
        return slice(self.kv_start, self.kv_stop)


def head_groups(num_heads: int, num_kv_heads: int, at_most: int = HEAD_GROUPS) -> tuple[HeadGroup, ...]:
    """Cut heads into equal groups, as many as divide the KV heads, which are not cut.

    Parameters
    ----------
    num_heads, num_kv_heads : int
        Of one rank; ``num_kv_heads`` divides ``num_heads``.
    at_most : int
        At least 1.

    Examples
    --------
    >>> head_groups(8, 2, 4)
    (HeadGroup(q_start=0, q_stop=4, kv_start=0, kv_stop=1), HeadGroup(q_start=4, q_stop=8, kv_start=1, kv_stop=2))
    """
    count = max(n for n in range(1, min(at_most, num_kv_heads) + 1) if num_kv_heads % n == 0)
    q, kv = num_heads // count, num_kv_heads // count
    return tuple(HeadGroup(i * q, (i + 1) * q, i * kv, (i + 1) * kv) for i in range(count))
