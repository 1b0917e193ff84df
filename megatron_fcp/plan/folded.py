"""The placement of a ring, for the batches that it fits exactly: every long document fills whole ranks.

::

    document on 4 ranks:  | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |    half a rank's tokens each

The n-th half from the start and the n-th from the end cost the same together whatever n is, so equal documents are in
balance without any search, and in fewer pieces than a search would cut them into.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.shape import BlockShapes, blocks_price

EVEN = 1.005  # price of the heaviest rank over the mean, up to which nothing is gained by a search
NEARLY = 1.05  # up to which it may still be better than what a search finds: it cuts least


def fold(
    table: BlockTable, shapes: BlockShapes, cp_size: int, q_half: float, kv_half: float
) -> tuple[IntArray, FloatArray] | None:
    """Owner of every block and price of every rank, where documents fit whole ranks and ranks come out nearly even.

    Parameters
    ----------
    table : BlockTable
    shapes : BlockShapes
    cp_size : int
        Divides the blocks of the table.
    q_half, kv_half : float
        See :class:`megatron_fcp.plan.cost.CostModel`.

    Returns
    -------
    tuple or None
        Arrays of shape [num_blocks] and [cp_size]; None where a document lies in a part of a rank and another one, or
        the heaviest rank is more than ``NEARLY`` times the mean.
    """
    slots = table.num_blocks // cp_size
    tokens = slots * table.block_size
    filled = table.document_length > 0
    start, length = table.document_start[filled], table.document_length[filled]
    spanning = start // tokens != (start + length - 1) // tokens
    whole = (start % tokens == 0) & (length % tokens == 0)
    if (spanning & ~whole).any() or (slots % 2 and spanning.any()):
        return None
    owner = np.arange(table.num_blocks) // slots
    for d in np.flatnonzero(spanning).tolist():
        first, ranks = int(start[d]) // tokens, int(length[d]) // tokens
        half = np.arange(2 * ranks)
        folded = first + np.minimum(half, 2 * ranks - 1 - half)
        owner[first * slots : (first + ranks) * slots] = np.repeat(folded, slots // 2)
    held = np.argsort(owner, kind="stable").reshape(cp_size, slots)
    price = np.array([blocks_price(blocks, slots, shapes, q_half, kv_half) for blocks in held])
    return (owner, price) if price.max() <= NEARLY * price.mean() else None
