"""Rounds in waves, for ranks that may not hold all that they receive.

A rank passes on what it received, so that it has to keep it. In a *wave* a rank receives at most half of what it may
hold, and blocks are passed on inside their wave: two waves are held at once, one is attended to while the next arrives.

All receivers of a unit get it in the same wave, or there would be nobody to pass it on. A long document is dealt out
over all waves, piece by piece, like cards, and not cut into consecutive stretches: so every rank that attends to it,
however much of it, has its share of work in every wave, and its owners have their share of sending::

    document   0 1 2 3 4 5 6 7 8 9 ...        stretches       wave 1: 0 1 2    wave 2: 3 4 5    wave 3: 6 7 8
    needed by rank a: 0..8, b: 0..2           dealt out       wave 1: 0 3 6    wave 2: 1 4 7    wave 3: 2 5 8
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, Scalar, frozen, offsets
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.bounded import BUFFERS
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.makespan import cut_stages, round_tokens, unit_tokens
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.schedule import CommSchedule, Waves
from megatron_fcp.plan.shape import block_shapes
from megatron_fcp.plan.swarm import Transfers, spread
from megatron_fcp.plan.units import Sharing, share_out

LEAST_ROUNDS = 16  # of a wave, where blocks are small enough, so that blocks can be passed on
PIECE = 1024  # tokens of a document that stay together
MOST_WAVES = 256


def schedule_in_waves(
    table: BlockTable, placement: Placement, cost: CostModel, compute_s: float, received: IntArray, limit: int
) -> CommSchedule | None:
    """Rounds and stages in which no rank holds more than ``limit`` KV tokens of others at once.

    Parameters
    ----------
    table, placement, cost
    compute_s : float
        Kernel seconds of all ranks together.
    received : IntArray, shape [cp_size]
        KV tokens that each rank receives.
    limit : int
        Less than the largest of them.

    Returns
    -------
    CommSchedule or None
        None where it would take more than :data:`MOST_WAVES`.
    """
    size = limit // BUFFERS
    shapes = block_shapes(table, cost.q_half, cost.kv_half)
    tokens = min(round_tokens(compute_s / placement.cp_size, cost), size / LEAST_ROUNDS)
    blocks_per_round = max(int(tokens / table.block_size), 1)
    sharing = share_out(table, shapes, placement.block_rank, placement.cp_size, max(blocks_per_round // 2, 1))
    room = np.where(received > limit, size, limit)  # who can keep everything is not bound to waves
    count = -(-int(received.max()) // size)
    while True:
        if count > MOST_WAVES:
            return None
        wave, fits = _deal(sharing, unit_tokens(table, sharing), room, count, min(PIECE, size))
        if fits:
            break
        count += max(count // 16, 1)
    transfers, ends = _spread_each(sharing, wave, count, cost, blocks_per_round)
    waves = Waves(frozen(ends), limit)
    return cut_stages(table, shapes, placement.block_rank, sharing, transfers, cost, waves)[0]


@njit(cache=True)
def _deal(sharing: Sharing, tokens: IntArray, room: IntArray, num_waves: int, piece: int) -> tuple[IntArray, bool]:
    """Wave of each unit, and whether no rank receives more than its ``room`` in a wave; long documents first."""
    filled = np.zeros((room.size, num_waves))
    need = np.zeros(room.size)
    wave = np.full(tokens.size, -1, dtype=np.int64)
    size = np.zeros(sharing.unit_ptr.size - 1, dtype=np.int64)
    for u in range(tokens.size):
        size[sharing.unit_document[u]] += tokens[u]
    fits = True
    for d in np.argsort(-size, kind="mergesort"):
        low, high = sharing.share_ptr[d], sharing.share_ptr[d + 1]
        u = sharing.unit_ptr[d] if low < high else sharing.unit_ptr[d + 1]
        while u < sharing.unit_ptr[d + 1]:
            stop, total = u, 0
            while stop < sharing.unit_ptr[d + 1] and (stop == u or total + tokens[stop] <= piece):
                total += tokens[stop]
                stop += 1
            for e in range(low, high):
                r = sharing.share_rank[e]
                need[r] = 0
                for k in range(u, min(stop, sharing.share_stop[e])):
                    if sharing.unit_owner[k] != r:
                        need[r] += tokens[k] / room[r]
            best, fullest = _emptiest(sharing.share_rank[low:high], need, filled)
            for r in sharing.share_rank[low:high]:
                filled[r, best] += need[r]
            fits &= fullest <= 1 + 1e-9
            wave[u:stop] = best
            u = stop
    return wave, fits


@njit(cache=True)
def _emptiest(ranks: IntArray, need: FloatArray, filled: FloatArray) -> tuple[Scalar, Scalar]:
    """The wave in which the fullest of these ranks is the least full with what it needs, and how full."""
    best, least, least_sum = 0, np.inf, np.inf
    for w in range(filled.shape[1]):
        most, total = 0.0, 0.0
        for r in ranks:
            if need[r] > 0:
                most = max(most, filled[r, w] + need[r])
                total += filled[r, w]
        if most < least or (most == least and total < least_sum):
            best, least, least_sum = w, most, total
    return best, least


def _spread_each(
    sharing: Sharing, wave: IntArray, count: int, cost: CostModel, blocks_per_round: int
) -> tuple[Transfers, list[int]]:
    """Rounds of all waves, one after the other, and the last of each."""
    cp_size = sharing.rank_ptr.size - 1
    fast = cost.intra_bytes_per_s / cost.inter_bytes_per_s
    parts: list[Transfers] = []
    ends: list[int] = []
    num_rounds = num_messages = 0
    for w in range(count):
        chosen = np.flatnonzero(wave == w)
        t = spread(_restrict(sharing, chosen), cp_size, cost.ranks_per_node, fast, blocks_per_round)
        if not t.src.size:
            continue
        parent = np.where(t.parent >= 0, t.parent + num_messages, -1)
        parts.append(t._replace(round=t.round + num_rounds, unit=chosen[t.unit], parent=parent))
        num_rounds += int(t.round[-1]) + 1
        num_messages += t.src.size
        ends.append(num_rounds - 1)
    ptr = offsets(np.concatenate([np.diff(p.message_ptr) for p in parts]))
    src, dst, tier, round_, unit, share, parent = (
        np.concatenate(arrays) for arrays in zip(*(p[1:] for p in parts), strict=True)
    )
    return Transfers(ptr, src, dst, tier, round_, unit, share, parent), ends


def _restrict(sharing: Sharing, chosen: IntArray) -> Sharing:
    """The part of a sharing that is about some units (ascending)."""
    below = np.zeros(sharing.unit_first.size + 1, dtype=np.int64)
    below[chosen + 1] = 1
    below = np.cumsum(below)
    stop, ptr = below[sharing.share_stop], below[sharing.unit_ptr]
    order = np.lexsort((stop - ptr[sharing.share_document], sharing.share_rank))
    return sharing._replace(
        unit_first=sharing.unit_first[chosen], unit_count=sharing.unit_count[chosen],
        unit_owner=sharing.unit_owner[chosen], unit_document=sharing.unit_document[chosen],
        unit_ptr=ptr, share_stop=stop, rank_share=order,
    )  # fmt: skip
