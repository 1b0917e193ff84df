"""Which rank owns which block.

The rule of this module: longest processing time first on compute (Graham 1969, 4/3 bound) under an exact limit of
blocks per rank, then swaps that shrink the heaviest rank. :mod:`megatron_fcp.plan.strips` places for windows, and for a
named cluster :mod:`megatron_fcp.plan.makespan` weighs traffic and topology as well.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.blocks import BlockTable

MAX_SWAPS_PER_RANK = 16


@dataclass(frozen=True)
class Placement:
    """Owner of every block.

    Attributes
    ----------
    cp_size : int
    block_rank : IntArray, shape [num_blocks]
        Every rank owns exactly ``num_blocks // cp_size`` blocks.
    """

    cp_size: int
    block_rank: IntArray

    def blocks_of(self, rank: int) -> IntArray:
        """Blocks of ``rank`` in stream order, shape [num_blocks // cp_size]."""
        return np.flatnonzero(self.block_rank == rank).astype(np.int64)

    def rank_cost(self, table: BlockTable) -> IntArray:
        """Query-key pairs per rank, shape [cp_size]."""
        cost = np.zeros(self.cp_size, dtype=np.int64)
        np.add.at(cost, self.block_rank, table.block_cost)
        return cost


def place_blocks(table: BlockTable, cp_size: int) -> Placement:
    """Balance compute over ranks with equal token counts.

    Parameters
    ----------
    table : BlockTable
    cp_size : int
        Must divide the number of blocks.
    """
    assert table.num_blocks % cp_size == 0, (table.num_blocks, cp_size)
    return Placement(cp_size, frozen(balance(table.block_cost, cp_size)))


def balance(cost: IntArray, cp_size: int) -> IntArray:
    """Owner of each thing of cost ``cost``; every one of ``cp_size`` ranks owns equally many."""
    slots = cost.size // cp_size
    owner = np.empty(cost.size, dtype=np.int64)
    heap = [(0, rank) for rank in range(cp_size)]  # heapq breaks ties by rank: deterministic
    used = [0] * cp_size
    for thing in np.argsort(-cost, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        owner[thing] = rank
        used[rank] += 1
        if used[rank] < slots:
            heapq.heappush(heap, (load + int(cost[thing]), rank))
    _swap(cost, owner, cp_size)
    return owner


def _swap(cost: IntArray, owner: IntArray, cp_size: int) -> None:
    """Trade a block of the heaviest rank for a cheaper one elsewhere while that lowers the larger of the two loads."""
    load = np.zeros(cp_size, dtype=np.int64)
    np.add.at(load, owner, cost)
    for _ in range(MAX_SWAPS_PER_RANK * cp_size):
        heavy = int(load.argmax())
        light = int(load.argmin())
        gap = int(load[heavy] - load[light])
        mine, theirs = np.flatnonzero(owner == heavy), np.flatnonzero(owner == light)
        i, j = _best_trade(cost[mine], cost[theirs], gap)
        if i < 0:
            return
        moved = int(cost[mine[i]] - cost[theirs[j]])
        owner[mine[i]], owner[theirs[j]] = light, heavy
        load[heavy] -= moved
        load[light] += moved


def _best_trade(mine: IntArray, theirs: IntArray, gap: int) -> tuple[int, int]:
    """Which two to swap so that loads ``gap`` apart come closest; the first of several, -1 if none helps.

    Only the two of ``theirs`` next to the price that would halve the gap can be best for one of ``mine``: there is no
    table of all pairs, which a rank of many small blocks could not hold.
    """
    if not theirs.size:
        return -1, -1
    ordered = np.sort(theirs)
    at = np.searchsorted(ordered, mine - gap // 2)
    near = np.stack([ordered[np.clip(at + step, 0, ordered.size - 1)] for step in (-1, 0)])
    useful = _useful(mine - near, gap).max(axis=0, initial=0)
    i = int(useful.argmax())
    if useful[i] == 0:
        return -1, -1
    return i, int(_useful(mine[i] - theirs, gap).argmax())


def _useful(moved: IntArray, gap: int) -> IntArray:
    """By how much the larger of two loads falls."""
    return np.where((moved > 0) & (moved < gap), np.minimum(moved, gap - moved), 0)
