"""Units of transfer and who takes part: the sharing problem that :mod:`plan.swarm` schedules.

A *unit* is a run of at most ``max_blocks`` consecutive blocks of one owner whose KV belongs to one document. A
*share* is a rank's part in a document that several ranks hold: what it owns, and the units before its latest block
that it needs. Sets of units are bit sets over the units of the share's document.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.shape import BlockShapes


class Sharing(NamedTuple):
    """Units and shares; a document has the units ``unit_ptr[d]:unit_ptr[d + 1]``, shares ``share_ptr[d]:...``.

    Attributes
    ----------
    unit_first, unit_count, unit_owner, unit_document : IntArray, shape [num_units]
        First block, blocks, owner and document.
    unit_ptr, share_ptr : IntArray, shape [num_documents + 1]
    share_rank, share_document, share_stop : IntArray, shape [num_shares]
        By document, then rank; the rank needs the units below ``share_stop`` that it does not own.
    rank_share, rank_ptr : IntArray, shapes [num_shares], [cp_size + 1]
        Shares of each rank, those that need the fewest units first.
    """

    unit_first: IntArray
    unit_count: IntArray
    unit_owner: IntArray
    unit_document: IntArray
    unit_ptr: IntArray
    share_ptr: IntArray
    share_rank: IntArray
    share_document: IntArray
    share_stop: IntArray
    rank_share: IntArray
    rank_ptr: IntArray


def share_out(table: BlockTable, shapes: BlockShapes, owner: IntArray, cp_size: int, max_blocks: int) -> Sharing:
    """Units and shares of a causal placement."""
    first, last = table.document_blocks()
    travels = np.where(shapes.tail >= 0, shapes.tail, shapes.head)
    ends = np.where(travels >= 0, last[np.maximum(travels, 0)] if last.size else 0, -1)
    travels = np.where(ends > np.arange(table.num_blocks), travels, -1)
    units, unit_ptr = _units(travels, owner, max_blocks, first.size)
    shares, share_ptr = _shares(first, last, owner, cp_size, units, unit_ptr)
    order = np.lexsort((shares[2] - unit_ptr[shares[1]], shares[0]))
    rank_ptr = np.searchsorted(shares[0][order], np.arange(cp_size + 1))
    return Sharing(*units, unit_ptr, share_ptr, *shares, order, rank_ptr)


@njit(cache=True)
def _units(
    travels: IntArray, owner: IntArray, max_blocks: int, num_documents: int
) -> tuple[tuple[IntArray, IntArray, IntArray, IntArray], IntArray]:
    first = np.empty(travels.size, dtype=np.int64)
    count = np.empty(travels.size, dtype=np.int64)
    unit_owner = np.empty(travels.size, dtype=np.int64)
    document = np.empty(travels.size, dtype=np.int64)
    ptr = np.zeros(num_documents + 1, dtype=np.int64)
    n = 0
    for b in range(travels.size):
        d = travels[b]
        if d < 0:
            continue
        if (
            n > 0
            and document[n - 1] == d
            and unit_owner[n - 1] == owner[b]
            and first[n - 1] + count[n - 1] == b
            and count[n - 1] < max_blocks
        ):
            count[n - 1] += 1
            continue
        first[n], count[n], unit_owner[n], document[n] = b, 1, owner[b], d
        ptr[d + 1] += 1
        n += 1
    for d in range(num_documents):
        ptr[d + 1] += ptr[d]
    return (first[:n], count[:n], unit_owner[:n], document[:n]), ptr


@njit(cache=True)
def _shares(
    first: IntArray,
    last: IntArray,
    owner: IntArray,
    cp_size: int,
    units: tuple[IntArray, IntArray, IntArray, IntArray],
    unit_ptr: IntArray,
) -> tuple[tuple[IntArray, IntArray, IntArray], IntArray]:
    unit_first = units[0]
    size = 0
    for d in range(first.size):
        size += min(last[d] - first[d] + 1, cp_size)
    rank = np.empty(size, dtype=np.int64)
    document = np.empty(size, dtype=np.int64)
    stop = np.empty(size, dtype=np.int64)
    ptr = np.zeros(first.size + 1, dtype=np.int64)
    latest = np.full(cp_size, -1, dtype=np.int64)
    seen = np.empty(cp_size, dtype=np.int64)
    n = 0
    for d in range(first.size):
        num = 0
        for b in range(first[d], last[d] + 1):
            r = owner[b]
            if latest[r] < 0:
                seen[num] = r
                num += 1
            latest[r] = b
        if num > 1:
            for r in np.sort(seen[:num]):
                rank[n], document[n] = r, d
                low, high = unit_ptr[d], unit_ptr[d + 1]
                at = low + np.searchsorted(unit_first[low:high], latest[r])
                stop[n] = at
                n += 1
        for i in range(num):
            latest[seen[i]] = -1
        ptr[d + 1] = n
    return (rank[:n], document[:n], stop[:n]), ptr
