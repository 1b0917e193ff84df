"""The gains of FCP's parts one by one, as Table 2 of arXiv 2605.08524 has them.

All rungs share one placement; the last is the plan itself::

    base                  a rank pulls one block, attends to it, pulls the next; everyone in stream order; Q, K, V move
                          in before and the output home after
    + block pipeline      transfers run ahead of the kernels
    + congestion-free     the same single-block transfers in rounds without two senders at one receiver
    + coalescing          the plan's messages, relays and stages: fewer launches, longer kernels
    + reshuffle overlap   the layout's way in and home hides behind the kernels of other heads
"""

from __future__ import annotations

import itertools

import numpy as np

from megatron_fcp.config import HEAD_GROUPS
from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.coloring import color_edges
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.schedule import PAPER_ROUNDS_PER_STAGE
from megatron_fcp.plan.transfers import needed_blocks
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import local_s, remote_s
from megatron_fcp.simulate.lower import PUSH_FACTOR, plan_program
from megatron_fcp.simulate.program import Builder, Program
from megatron_fcp.simulate.reshuffle import with_reshuffle

LAG = PAPER_ROUNDS_PER_STAGE  # pull rounds that are posted ahead of a round's pushes
RUNGS = ("base", "+ block pipeline", "+ congestion-free order", "+ coalescing", "+ reshuffle overlap")
PUBLISHED = {"forward": (0.29, 0.48, 0.62, 0.70, 0.75), "backward": (0.37, 0.46, 0.59, 0.69, 0.74)}  # Table 2


def ladder(plan: Plan, case: Case, *, backward: bool = False) -> dict[str, float]:
    """Efficiency of each rung."""
    programs = [
        _single_blocks(plan, case, pipelined=False, ordered=False, backward=backward),
        _single_blocks(plan, case, pipelined=True, ordered=False, backward=backward),
        _single_blocks(plan, case, pipelined=True, ordered=True, backward=backward),
        plan_program(plan, case, backward=backward),
        plan_program(plan, case, backward=backward),
    ]
    return {
        rung: case.efficiency(
            with_reshuffle(program, plan, case, groups=HEAD_GROUPS if rung == RUNGS[-1] else 1, backward=backward),
            backward=backward,
        )
        for rung, program in zip(RUNGS, programs)
    }


def _single_blocks(plan: Plan, case: Case, *, pipelined: bool, ordered: bool, backward: bool) -> Program:
    """One transfer and one kernel call per needed block, sent by its owner."""
    table, owner, n = plan.table, plan.placement.block_rank, plan.cp_size
    cost = case.cost(backward=backward)
    rank, block = needed_blocks(table, plan.placement)
    turn = _turn(rank) if not ordered else color_edges(owner[block], rank, n)
    order = np.lexsort((rank, turn))
    rank, block, turn = rank[order], block[order], turn[order]
    out = Builder(n, plan.ranks_per_node)
    slow = case.slowdown()
    out.compute(np.arange(n), local_s(table, owner, n, cost) * slow)
    seconds = remote_s(table, owner, rank, np.arange(rank.size), block, rank.size, cost) * slow[rank]
    return _emit(out, case, owner[block], rank, turn, seconds, table.block_size, pipelined, backward)


def _emit(
    out: Builder, case: Case, src: IntArray, dst: IntArray, turn: IntArray, seconds: np.ndarray, block_size: int,
    pipelined: bool, backward: bool,
) -> Program:  # fmt: skip
    """Turn by turn: the messages, then their kernels, then in backward the pushes."""
    cost = case.forward
    token_s = np.where(out.tier(src, dst) == 1, cost.token_s(1), cost.token_s(0))
    size = block_size * cost.kv_bytes
    previous = np.arange(out.num_ranks)  # last kernel call of each rank; the local ones came first
    edges = np.searchsorted(turn, np.arange(int(turn.max(initial=-1)) + 2))
    waiting: list[tuple[IntArray, int, int]] = []  # kernel calls whose partial dKV has not gone yet

    def push(kept: int) -> None:
        while len(waiting) > kept:
            calls, i, j = waiting.pop(0)
            seconds = cost.latency_s + PUSH_FACTOR * block_size * token_s[i:j]
            pushed = out.message(dst[i:j], src[i:j], seconds, PUSH_FACTOR * size)
            out.depend(pushed, calls)
            if not pipelined:
                previous[dst[i:j]] = pushed

    for k, (i, j) in enumerate(itertools.pairwise(edges.tolist())):
        s, d = src[i:j], dst[i:j]
        moved = out.message(s, d, cost.latency_s + block_size * token_s[i:j], size, stage=k + 1, round=k)
        if not pipelined:
            out.depend(moved, previous[d])
        calls = out.compute(d, seconds[i:j], stage=k + 1)
        out.depend(calls, moved)
        previous[d] = calls
        if backward:
            waiting.append((calls, i, j))
            push(LAG if pipelined else 0)
    push(0)
    return out.build()


def _turn(rank: IntArray) -> IntArray:
    """Place of each transfer among its receiver's; ``rank`` is sorted."""
    first = np.searchsorted(rank, rank)
    return np.arange(rank.size) - first
