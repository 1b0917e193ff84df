"""When a rank may begin to pull a stage, so that it never holds more KV of others than it may.

A stage's buffer can go once the stage is attended to and nothing more is sent from it; blocks are passed on inside
their wave only. So before a stage begins to arrive, as many of the stages of earlier waves are attended to as it takes
to make room::

    waves        |--- 1 ---|--- 2 ---|--- 3 ---|
    stages         1    2    3    4    5    6
    held at 5           2    3    4    5           if these four fit; stage 1 is attended to by then

Ranks whose KV fits as a whole never wait, and neither does anybody where blocks are passed on without waves: the
partial dKV of all stages, in fp32, is held there until the last pull is in, and forward holds less than that. Where
owners send all that they have, two stages are held.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megatron_fcp.plan.arrays import IntArray, offsets
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.bounded import BUFFERS
from megatron_fcp.plan.calls import message_stages
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.schedule import CommSchedule
from megatron_fcp.plan.transfers import message_tokens


def attended_before(table: BlockTable, schedule: CommSchedule, *, all_at_once: bool) -> tuple[IntArray, ...]:
    """Stage up to which a rank has attended when it begins to pull each stage, shape [num_stages + 1] per rank.

    0: none but the local one, which takes no room. ``all_at_once``: without waves all stages may be held.
    """
    ends = schedule.stage_ends
    if schedule.waves is None and all_at_once:
        return tuple(np.zeros(e.size + 1, dtype=np.int64) for e in ends)
    if schedule.waves is None:
        return tuple(np.maximum(np.arange(e.size + 1) - BUFFERS, 0) for e in ends)
    ptr = offsets([e.size for e in ends])
    stage = ptr[schedule.messages.dst] + message_stages(schedule) - 1
    held = np.bincount(stage, message_tokens(table, schedule.messages), minlength=int(ptr[-1])).astype(np.int64)
    wave = np.searchsorted(schedule.waves.ends, np.concatenate(ends))
    before = _attended(ptr, held, wave, schedule.waves.held_tokens)
    return tuple(np.append(0, before[low:high]) for low, high in pairwise(ptr.tolist()))


def attended_when_posted(schedule: CommSchedule, attended: tuple[IntArray, ...]) -> IntArray:
    """Stage up to which sender and receiver of each message have attended when they post it, shape [2, num_messages].

    Exchanges are posted in order, so who waits for room posts nothing in the meantime.
    """
    m, stage = schedule.messages, message_stages(schedule)
    out = np.zeros((2, len(m)), dtype=np.int64)
    for rank, before in enumerate(attended):
        mine = np.flatnonzero((m.src == rank) | (m.dst == rank))
        through = np.maximum.accumulate(before[np.where(m.dst[mine] == rank, stage[mine], 0)])
        for side, ranks in enumerate((m.src, m.dst)):
            here = ranks[mine] == rank
            out[side, mine[here]] = through[here]
    return out


@njit(cache=True)
def _attended(ptr: IntArray, held: IntArray, wave: IntArray, limit: int) -> IntArray:
    out = np.zeros(held.size, dtype=np.int64)
    for r in range(ptr.size - 1):
        first = ptr[r]  # of those that are still held
        total = 0
        for s in range(ptr[r], ptr[r + 1]):
            total += held[s]
            while total > limit and wave[first] < wave[s]:
                total -= held[first]
                first += 1
            out[s] = first - ptr[r]
    return out
