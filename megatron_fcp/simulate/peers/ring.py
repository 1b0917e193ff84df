"""Rings with zig-zag sharding: the pass that several peers share.

A ring of ``p`` ranks cuts every document into ``2 p`` chunks of ``c`` tokens, and rank ``i`` holds chunks ``i`` and
``2 p - 1 - i``. KV of all its documents goes round the ring; what comes from an earlier rank meets both query chunks
with its first half, what comes from a later one meets the second query chunk whole, so each step costs every rank
``2 c c`` pairs per document::

    step 0          2c causal
    from j < i      2c queries x  c keys
    from j > i       c queries x 2c keys

Sources: TransformerEngine ``transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py``
(DualChunkSwap, and documents padded to a multiple of ``2 * cp_size``); zhuzilin/ring-flash-attention
``zigzag_ring_flash_attn_varlen.py``.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import causal_s, full_s
from megatron_fcp.simulate.program import Builder

BACKWARD_TRAFFIC = 2  # KV again, and as many bytes of dKV (bf16, in the rings' favour)


def chunk_tokens(lengths: IntArray, ranks: int) -> IntArray:
    """Tokens per chunk after padding to a multiple of ``2 * ranks``."""
    return -(-lengths // (2 * ranks))


def ring_pass(
    out: Builder, ranks: IntArray, lengths: IntArray, case: Case, *, backward: bool, local: FloatArray | float = 0.0,
    share: float = 1.0, after: IntArray | None = None,
) -> IntArray:  # fmt: skip
    """Add a ring over ``ranks`` to ``out``; returns each rank's last kernel call.

    Parameters
    ----------
    out : Builder
    ranks : IntArray, shape [ring_size]
        In ring order.
    lengths : IntArray
        Documents that the whole ring shares.
    case : Case
    backward : bool
    local : float or FloatArray, shape [ring_size]
        Seconds of other work that each rank does in step 0.
    share : float
        Part of the heads (and of KV's bytes) that this ring computes.
    after : IntArray, optional, shape [ring_size]
        Operations that each rank waits for first.
    """
    cost, p = case.cost(backward=backward), ranks.size
    slow = case.slowdown()[ranks]
    c = chunk_tokens(lengths, p)
    start = float(causal_s(2 * c if p > 1 else lengths, cost).sum()) * share
    from_earlier, from_later = float(full_s(2 * c, c, cost).sum()) * share, float(full_s(c, 2 * c, cost).sum()) * share
    calls = [out.compute(ranks, (local + start) * slow)]
    if after is not None:
        out.depend(calls[0], after)
    size = int(2 * c.sum() * cost.kv_bytes * share) * (BACKWARD_TRAFFIC if backward else 1)
    if p == 1 or size == 0:
        return calls[-1]
    src, dst, place = ranks, np.roll(ranks, -1), np.arange(p)
    token_s = np.where(out.tier(src, dst) == 1, cost.token_s(1), cost.token_s(0))
    seconds = cost.latency_s + size / cost.kv_bytes * token_s
    arrived = np.full(p, -1) if after is None else after
    for step in range(1, p):
        moved = out.message(src, dst, seconds, size, stage=step, round=step - 1)
        out.depend(moved, arrived)  # what came in the step before goes on
        if step >= 2:
            out.depend(moved, np.roll(calls[step - 2], -1))  # two buffers: the receiver frees one
        arrived = np.roll(moved, 1)
        call = out.compute(ranks, np.where(place >= step, from_earlier, from_later) * slow, stage=step)
        out.depend(call, arrived)
        calls.append(call)
    return calls[-1]
