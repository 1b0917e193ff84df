"""Grouping by length: a document gets the fewest ranks that hold it; the short ones fill up single ranks.

Source: ByteScale, SIGCOMM 2025 (arXiv 2502.21231): groups of any number of ranks, best-fit packing of short sequences,
ring attention inside a group. Its balance of FLOPs over several micro-batches acts outside a single attention call and
is not modelled. Short documents that fit no rank's room whole are cut where the stream would run over.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import causal_s
from megatron_fcp.simulate.peers.ring import ring_pass
from megatron_fcp.simulate.program import Program


def bytescale(case: Case, *, backward: bool = False) -> Program:
    """Rings of minimal size for long documents, nothing to send for the others."""
    limit, cost, out = case.tokens_per_rank, case.cost(backward=backward), case.builder()
    lengths = np.sort(case.lengths)[::-1]
    long = lengths[lengths > limit]
    size = -(-long // limit)
    fits = np.cumsum(size) <= case.cp_size  # the remainders of many groups may add up to more ranks than there are
    long, size, rest = long[fits], size[fits], np.concatenate([long[~fits], lengths[lengths <= limit]])
    room = np.full(case.cp_size, limit, dtype=np.int64)
    group = np.repeat(np.arange(long.size), size)
    room[: group.size] -= (-(-long // size))[group]
    local = pack(rest, room, cost_of=lambda tokens: causal_s(tokens, cost))
    first = 0
    for length, ranks in zip(long, size):
        members = np.arange(first, first + ranks)
        ring_pass(out, members, np.array([length]), case, backward=backward, local=local[members])
        first += int(ranks)
    alone = np.arange(first, case.cp_size)
    out.compute(alone, local[alone] * case.slowdown()[alone])
    return out.build()


def pack(lengths: IntArray, room: IntArray, cost_of: Callable[[IntArray], FloatArray]) -> FloatArray:
    """Best-fit decreasing of ``lengths`` into ``room`` (both change nothing outside); seconds by rank.

    Among the ranks with room for a document the one with the least work takes it; where none has room, the document is
    cut over the emptiest ranks.
    """
    room, seconds = room.copy(), np.zeros(room.size)
    for length, price in zip(lengths.tolist(), cost_of(lengths).tolist()):
        fitting = np.flatnonzero(room >= length)
        if fitting.size:
            rank = fitting[seconds[fitting].argmin()]
            room[rank] -= length
            seconds[rank] += price
            continue
        left = length
        while left > 0 and room.max() > 0:
            rank = int(room.argmax())
            piece = min(left, int(room[rank]))
            room[rank] -= piece
            left -= piece
            seconds[rank] += float(cost_of(np.array([piece]))[0])
    return seconds
