"""Megatron's dynamic context parallelism: groups of a power of two, each document whole on one group.

Source: NVIDIA/Megatron-LM ``megatron/core/pipeline_parallel/hybrid_cp_schedule.py`` and ``datasets/data_schedule.py``
(pull requests 2054 and 2282): a document goes to the smallest power-of-two group that holds it at
``max_seqlen_per_dp_cp_rank`` tokens per rank, work is estimated as ``length ** 2 / group size``, and documents are
dealt out, longest first, to the group with the least work. Ring attention inside a group; a rank runs its groups one
after the other.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import causal_s
from megatron_fcp.simulate.peers.ring import ring_pass
from megatron_fcp.simulate.program import Program

SLACK = 0.05  # the scheduler's cap on a rank's tokens is not exact: total * max_seqlen_per_rank * (1 + delta)


def dynamic_cp(case: Case, *, backward: bool = False) -> Program:
    """Aligned groups, longest document first, least work first."""
    n, cost, out = case.cp_size, case.cost(backward=backward), case.builder()
    largest = 1 << (n.bit_length() - 1)  # a document longer than the largest group still goes there
    room = np.full(n, int(case.tokens_per_rank * (1 + SLACK)), dtype=np.int64)
    work, local = np.zeros(n), np.zeros(n)
    for length in np.sort(case.lengths)[::-1].tolist():
        ranks = 1
        while ranks < largest and length > ranks * case.tokens_per_rank:
            ranks *= 2
        share = -(-length // ranks)
        groups = n // ranks
        free = room[: groups * ranks].reshape(groups, ranks).min(axis=1)
        busy = work[: groups * ranks].reshape(groups, ranks).max(axis=1)
        open_ = np.flatnonzero(free >= share)
        group = open_[busy[open_].argmin()] if open_.size else int(free.argmax())
        members = np.arange(group * ranks, (group + 1) * ranks)
        room[members] -= share
        work[members] += length * length / ranks
        if ranks == 1:
            local[members] += causal_s(length, cost)
        else:
            ring_pass(out, members, np.array([length]), case, backward=backward)
    out.compute(np.arange(n), local * case.slowdown())
    return out.build()
