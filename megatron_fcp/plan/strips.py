"""Which rank owns which block where every layer has a window: strips of consecutive blocks.

A query needs nothing but the window before it, so the fewer ends the strips have, the less moves; and since all tokens
of long documents cost the same behind their first window, long strips often balance as well. Where they do not, among
many short documents, shorter strips do.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.placement import Placement, balance
from megatron_fcp.plan.transfers import needed_blocks

STRIP_SLACK = 1.02
PAIRS_PER_TOKEN = 1024  # about 1560 on H100 with 400 Gb/s each, 64 query and 8 KV heads


def place_strips(table: BlockTable, cp_size: int, pairs_per_token: float = PAIRS_PER_TOKEN) -> Placement:
    """Balance compute over ranks in strips of consecutive blocks, as long as the busiest rank allows.

    Parameters
    ----------
    table : BlockTable
        With a window.
    cp_size : int
        Must divide the number of blocks.
    pairs_per_token : float
        Query-key pairs that a rank attends to in the time in which it receives or sends the KV of one token.

    Notes
    -----
    Tries every length that divides a rank's blocks, the longest first, and takes the longest one that comes within
    ``STRIP_SLACK`` of the best: the busiest rank's compute or traffic, whichever takes longer. One strip per rank is
    the stream cut into equal pieces; strips of one block are what :func:`place_blocks` places.
    """
    assert table.num_blocks % cp_size == 0, (table.num_blocks, cp_size)
    slots = table.num_blocks // cp_size
    enough = STRIP_SLACK * int(table.block_cost.sum()) / cp_size
    tried: list[tuple[float, Placement]] = []
    for length in (n for n in range(slots, 0, -1) if slots % n == 0):
        strips = balance(table.block_cost.reshape(-1, length).sum(axis=1), cp_size)
        placement = Placement(cp_size, frozen(np.repeat(_in_stream_order(strips), length)))
        tried.append((_busiest(table, placement, pairs_per_token), placement))
        if tried[-1][0] <= enough:
            break
    best = min(price for price, _ in tried)
    return next(placement for price, placement in tried if price <= STRIP_SLACK * best)


def _in_stream_order(owner: IntArray) -> IntArray:
    """Ranks numbered by their first block, so that neighbours in the stream are neighbours in the network."""
    _, first = np.unique(owner, return_index=True)
    return np.argsort(np.argsort(first))[owner]


def _busiest(table: BlockTable, placement: Placement, pairs_per_token: float) -> float:
    """Pair times of the busiest rank's compute or traffic."""
    rank, block = needed_blocks(table, placement)
    tokens = (table.shared_stop - table.shared_start)[block]
    traffic = np.zeros((2, placement.cp_size), dtype=np.int64)
    np.add.at(traffic[0], rank, tokens)
    np.add.at(traffic[1], placement.block_rank[block], tokens)
    return max(float(placement.rank_cost(table).max()), pairs_per_token * float(traffic.max()))
