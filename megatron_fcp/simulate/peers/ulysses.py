"""Ulysses inside groups, rings between them (USP); plain Ulysses where one group holds all ranks.

Sources: DeepSpeed-Ulysses (arXiv 2309.14509): all-to-all from tokens to heads and back; its degree ends at the number
of KV heads. USP (arXiv 2405.07719, feifeibear/long-context-attention): Ulysses groups of neighbouring ranks, a zig-zag
ring over the ranks of equal place in their groups.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.peers.ring import ring_pass
from megatron_fcp.simulate.program import Builder, Program


def usp(case: Case, *, backward: bool = False) -> Program:
    """The largest Ulysses degree that heads and nodes allow, rings for the rest."""
    n = case.cp_size
    degree = math.gcd(n, case.shape.num_kv_heads)
    if case.hardware.ranks_per_node > 1:
        degree = math.gcd(degree, case.hardware.ranks_per_node)
    out, ranks = case.builder(), np.arange(n)
    q_bytes = case.shape.num_heads * case.shape.head_dim * case.shape.bytes_per_element
    kv_bytes = case.forward.kv_bytes
    heads = None
    if degree > 1:  # backward brings Q, K, V and dO to the heads, and takes dQ, dK, dV back
        heads = _all_to_all(out, case, ranks, degree, q_bytes + kv_bytes + (q_bytes if backward else 0), None)
    last = np.empty(n, dtype=np.int64)
    for place in range(degree):
        ring = ranks[place::degree]
        last[ring] = ring_pass(
            out, ring, case.lengths, case, backward=backward, share=1 / degree,
            after=None if heads is None else heads[ring],
        )  # fmt: skip
    if degree > 1:
        _all_to_all(out, case, ranks, degree, q_bytes + (kv_bytes if backward else 0), last)
    return out.build()


def _all_to_all(
    out: Builder, case: Case, ranks: IntArray, degree: int, token_bytes: int, after: IntArray | None
) -> IntArray:
    """Redistribute ``token_bytes`` per token inside groups of ``degree``; waits for the whole group."""
    cost = case.forward
    tier = int(out.tier(0, degree - 1))
    size = case.tokens_per_rank * token_bytes * (degree - 1) // degree
    rate = cost.inter_bytes_per_s if tier else cost.intra_bytes_per_s
    ops = np.empty(ranks.size, dtype=np.int64)
    for first in range(0, ranks.size, degree):
        group = ranks[first : first + degree]
        ready = None if after is None else out.join(after[group])
        ops[group] = out.collective(group, tier, cost.latency_s + size / rate, size)
        if ready is not None:
            out.depend(ops[group], ready)
    return ops
