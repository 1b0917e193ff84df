"""A plan as a program: forward, and backward with its pushes.

::

    forward    pull rounds ....... each stage's kernels start when its last message is in
    backward   the same pulls and kernels, then the stage's dKV goes back along the reversed edges in fp32

The links of both directions and tiers are full duplex; in backward pulls and pushes share them in the order in which
the runtime posts them.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, offsets
from megatron_fcp.plan.backward import transfer_arrays
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.schedule import tier_of
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import local_s, remote_s
from megatron_fcp.simulate.program import COMPUTE, MESSAGE, Builder, Program

PUSH_FACTOR = 2  # partial dKV travels in fp32, KV in bf16


def plan_program(plan: Plan, case: Case, *, backward: bool = False, held_stages: int | None = None) -> Program:
    """Lower ``plan``.

    Parameters
    ----------
    plan : Plan
        Causal.
    case : Case
        Its hardware, heads and speeds; the plan's own lengths count.
    backward : bool
    held_stages : int, optional
        Stages of KV that a rank may hold: it pulls stage ``s`` only once it has attended to stage ``s - held_stages``,
        as the runtime does with 2. None: no limit.

    Raises
    ------
    ValueError
        If the mask is not causal or the plan is for other ranks than the case.
    """
    if plan.table.mask != "causal":
        raise ValueError(f"only causal plans can be simulated, this one's mask is {plan.table.mask!r}")
    if plan.cp_size != case.cp_size:
        raise ValueError(f"the plan is for {plan.cp_size} ranks, the cluster has {case.cp_size}")
    return _Lowering(plan, case, backward).program(held_stages)


def message_stages(plan: Plan) -> IntArray:
    """Stage (from 1) in which the receiver of each message attends to it, shape [num_messages]."""
    m, schedule = plan.schedule.messages, plan.schedule
    stage = np.zeros(len(m), dtype=np.int64)
    by_receiver = np.argsort(m.dst, kind="stable")
    edge = np.searchsorted(m.dst[by_receiver], np.arange(plan.cp_size + 1))
    for rank, ends in enumerate(schedule.stage_ends):
        mine = by_receiver[edge[rank] : edge[rank + 1]]
        stage[mine] = np.searchsorted(ends, schedule.message_round[mine]) + 1
    return stage


class _Lowering:
    """Numbers the plan's messages, kernels and pushes, sorts them by when they are posted, and links them."""

    def __init__(self, plan: Plan, case: Case, backward: bool) -> None:
        self.plan, self.case, self.backward = plan, case, backward
        self.cost = case.cost(backward=backward)
        self.stage = message_stages(plan)
        self.stage_ptr = offsets([ends.size + 1 for ends in plan.schedule.stage_ends])
        m = plan.schedule.messages
        self.counts = np.diff(m.ptr)
        self.message = np.repeat(np.arange(len(m)), self.counts)  # of each transfer
        self.by_arrival = np.argsort(m.dst[self.message] * plan.table.num_blocks + m.block, kind="stable")

    def program(self, held_stages: int | None) -> Program:
        plan, m = self.plan, self.plan.schedule.messages
        rank = np.repeat(np.arange(plan.cp_size), np.diff(self.stage_ptr))
        stage = np.arange(self.stage_ptr[-1]) - self.stage_ptr[rank]
        last_round = np.full(rank.size, -1, dtype=np.int64)
        for r, ends in enumerate(plan.schedule.stage_ends):
            last_round[self.stage_ptr[r] + 1 : self.stage_ptr[r + 1]] = ends
        num_pull, num_calls = len(m), rank.size
        push = plan.push if self.backward else None
        num_push = len(push.messages) if push else 0
        when = [plan.schedule.message_round * 4, last_round * 4 + 1]
        if push:
            when.append(push.after_pull[push.message_round] * 4 + 2)
        order = np.argsort(np.concatenate(when), kind="stable")
        number = np.empty(order.size, dtype=np.int64)
        number[order] = np.arange(order.size)
        pull_op, call_op, push_op = np.split(number, [num_pull, num_pull + num_calls])

        out = self._columns(order, rank, stage, num_push)
        out.depend(call_op[self.stage_ptr[m.dst] + self.stage], pull_op)
        parent = self._parents(m.src[self.message], m.block)
        out.depend(pull_op[self.message], np.where(parent >= 0, pull_op[self.message[parent]], -1))
        if held_stages is not None:
            before = self.stage - held_stages
            out.depend(pull_op, np.where(before >= 0, call_op[self.stage_ptr[m.dst] + np.maximum(before, 0)], -1))
        if push and num_push:
            self._link_pushes(out, call_op, push_op)
        return out.build()

    def _columns(self, order: IntArray, rank: IntArray, stage: IntArray, num_push: int) -> Builder:
        """All operations with their prices, in ``order``, nothing linked yet."""
        plan, m, block = self.plan, self.plan.schedule.messages, self.plan.table.block_size
        calls = self._call_seconds(rank)
        kind = [np.full(len(m), MESSAGE), np.full(rank.size, COMPUTE)]
        src, dst, stages = [m.src, rank], [m.dst, rank], [self.stage, stage]
        rounds = [plan.schedule.message_round, np.full(rank.size, -1)]
        size = [self.counts * block * self.cost.kv_bytes, np.zeros(rank.size, np.int64)]
        seconds = [self._message_seconds(m.src, m.dst, size[0]), calls]
        if num_push:
            p = plan.push.messages
            pushed = np.diff(p.ptr) * block * self.cost.kv_bytes * PUSH_FACTOR
            kind.append(np.full(num_push, MESSAGE))
            src.append(p.src)
            dst.append(p.dst)
            stages.append(np.full(num_push, -1))
            rounds.append(plan.schedule.num_rounds + plan.push.message_round)
            size.append(pushed)
            seconds.append(self._message_seconds(p.src, p.dst, pushed))
        all_src, all_dst = np.concatenate(src)[order], np.concatenate(dst)[order]
        out = Builder(plan.cp_size, plan.ranks_per_node)
        out.add(
            np.concatenate(kind)[order], all_src, all_dst, np.concatenate(seconds)[order],
            tier=out.tier(all_src, all_dst), size=np.concatenate(size)[order], stage=np.concatenate(stages)[order],
            round=np.concatenate(rounds)[order],
        )  # fmt: skip
        return out

    def _call_seconds(self, rank: IntArray) -> FloatArray:
        plan, m = self.plan, self.plan.schedule.messages
        receiver = m.dst[self.message]
        call = self.stage_ptr[receiver] + self.stage[self.message]
        owner = plan.placement.block_rank
        seconds = remote_s(plan.table, owner, receiver, call, m.block, rank.size, self.cost)
        seconds[self.stage_ptr[:-1]] += local_s(plan.table, owner, plan.cp_size, self.cost)
        return seconds * self.case.slowdown()[rank]

    def _message_seconds(self, src: IntArray, dst: IntArray, size: IntArray) -> FloatArray:
        tier = tier_of(src, dst, self.plan.ranks_per_node)
        per_byte = np.where(tier == 1, self.cost.token_s(1), self.cost.token_s(0)) / self.cost.kv_bytes
        return self.cost.latency_s + size * per_byte

    def _parents(self, holder: IntArray, block: IntArray) -> IntArray:
        """Transfer that brought each block to its holder; -1 where the holder owns it."""
        plan, m = self.plan, self.plan.schedule.messages
        parent = np.full(holder.size, -1, dtype=np.int64)
        relayed = np.flatnonzero(plan.placement.block_rank[block] != holder)
        if relayed.size:
            key = (m.dst[self.message] * plan.table.num_blocks + m.block)[self.by_arrival]
            at = np.searchsorted(key, holder[relayed] * plan.table.num_blocks + block[relayed])
            parent[relayed] = self.by_arrival[at]
        return parent

    def _link_pushes(self, out: Builder, call_op: IntArray, push_op: IntArray) -> None:
        """A partial goes back once its stage is through and those that the holder relays to have sent theirs."""
        push = self.plan.push.messages
        pushed = np.repeat(np.arange(len(push)), np.diff(push.ptr))
        source = self._parents(push.src[pushed], push.block)  # the pull that this transfer reverses
        out.depend(push_op[pushed], call_op[self.stage_ptr[push.src[pushed]] + self.stage[self.message[source]]])
        _, src, _, block = transfer_arrays(self.plan.schedule)
        up = self._parents(src, block)  # pull that fed the pull, by pull transfer
        push_of = np.empty(src.size, dtype=np.int64)
        push_of[source] = pushed
        child = np.flatnonzero(up >= 0)
        out.depend(push_op[push_of[up[child]]], push_op[push_of[child]])
