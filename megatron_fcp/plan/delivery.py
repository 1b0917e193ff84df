"""One pass over a plan: does every block get where it is needed? :mod:`plan.validate` names what is wrong."""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import BoolArray, IntArray
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.schedule import CommSchedule


def delivers(table: BlockTable, placement: Placement, schedule: CommSchedule) -> bool:
    """Whether messages list ascending blocks that hold something, from ranks that have them, to ranks that lack them,
    each once, and whether all that is needed arrives. Ranks, blocks and rounds must be in range."""
    first, stop = table.attended_blocks()
    m = schedule.messages
    return bool(
        _delivers(
            placement.block_rank, placement.cp_size, table.fragment_ptr, table.fragment_document, first, stop,
            table.shared_start < table.shared_stop, m.src, m.dst, m.ptr, m.block, schedule.message_round,
        )
    )  # fmt: skip


@njit(cache=True)
def grouped(key: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """Stable counting sort: indices by key, and where each of the ``size`` keys begins (shape [size + 1])."""
    ptr = np.zeros(size + 1, dtype=np.int64)
    for k in key:
        ptr[k + 1] += 1
    for k in range(size):
        ptr[k + 1] += ptr[k]
    at = ptr[:-1].copy()
    order = np.empty(key.size, dtype=np.int64)
    for i in range(key.size):
        order[at[key[i]]] = i
        at[key[i]] += 1
    return order, ptr


@njit(cache=True)
def _delivers(
    owner: IntArray,
    cp_size: int,
    fragment_ptr: IntArray,
    fragment_document: IntArray,
    first: IntArray,
    stop: IntArray,
    travels: BoolArray,
    src: IntArray,
    dst: IntArray,
    ptr: IntArray,
    block: IntArray,
    round_: IntArray,
) -> bool:
    by_owner, owner_ptr = grouped(owner, cp_size)
    by_src, src_ptr = grouped(src, cp_size)
    by_dst, dst_ptr = grouped(dst, cp_size)
    rounds = round_.max() + 1 if round_.size else 1
    since = np.full(owner.size, -1, dtype=np.int64)  # last rank seen to receive the block times rounds, plus its round
    for r in range(cp_size):
        for m in by_dst[dst_ptr[r] : dst_ptr[r + 1]]:
            for i in range(ptr[m], ptr[m + 1]):
                b = block[i]
                if owner[b] == r or since[b] >= r * rounds or not travels[b] or (i > ptr[m] and block[i - 1] >= b):
                    return False
                since[b] = r * rounds + round_[m]
        for m in by_src[src_ptr[r] : src_ptr[r + 1]]:
            for b in block[ptr[m] : ptr[m + 1]]:
                if owner[b] != r and not r * rounds <= since[b] < r * rounds + round_[m]:
                    return False
        document, checked = -1, 0
        for b in by_owner[owner_ptr[r] : owner_ptr[r + 1]]:
            low, high = fragment_ptr[b], fragment_ptr[b + 1]
            for f in range(low, high):
                if low < f < high - 1:  # lies wholly inside the block
                    continue
                if fragment_document[f] != document:
                    document, checked = fragment_document[f], first[f]
                for x in range(max(checked, first[f]), stop[f]):
                    if owner[x] != r and since[x] < r * rounds:
                        return False
                checked = max(checked, stop[f])
    return True


def in_step(schedule: CommSchedule, cp_size: int, ranks_per_node: int) -> bool:
    """Whether messages come in order of their rounds and no rank sends or receives twice on a tier in one."""
    m = schedule.messages
    return bool(_in_step(m.src, m.dst, schedule.message_round, cp_size, ranks_per_node))


@njit(cache=True)
def _in_step(src: IntArray, dst: IntArray, round_: IntArray, cp_size: int, ranks_per_node: int) -> bool:
    sent = np.full((2, cp_size), -1, dtype=np.int64)
    received = np.full((2, cp_size), -1, dtype=np.int64)
    for m in range(src.size):
        s, d, r = src[m], dst[m], round_[m]
        t = 0 if s // ranks_per_node == d // ranks_per_node else 1
        if sent[t, s] >= r or received[t, d] >= r or (m > 0 and round_[m - 1] > r):
            return False
        sent[t, s] = received[t, d] = r
    return True
