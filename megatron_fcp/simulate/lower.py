"""A plan as a program: forward, and backward with its pushes.

::

    forward    pull rounds ....... each stage's kernels start when its last message is in
    backward   the same pulls, kernels cut finer, each part's dKV on its way home in fp32 while others run

The links of both directions and tiers are full duplex; in backward pulls and pushes share them in the order in which
the runtime posts them.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, offsets, ranges
from megatron_fcp.plan.calls import message_stages
from megatron_fcp.plan.held import attended_when_posted
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.schedule import tier_of
from megatron_fcp.plan.transfers import Messages, message_tokens
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import local_s, pieces_s, remote_s, windowed_s
from megatron_fcp.simulate.program import COMPUTE, MESSAGE, Builder, Program

PUSH_FACTOR = 2  # partial dKV travels in fp32, KV in bf16


def plan_program(plan: Plan, case: Case, *, backward: bool = False, wait_for_room: bool = False) -> Program:
    """Lower ``plan``.

    Parameters
    ----------
    plan : Plan
        Causal.
    case : Case
        Its hardware, heads, speeds and window; the plan's own lengths count.
    backward : bool
    wait_for_room : bool
        A rank posts nothing more until it has attended to what must make room for the stage that it pulls next, as the
        runtime does (:mod:`megatron_fcp.plan.held`).

    Raises
    ------
    ValueError
        If the mask is not causal, or the plan is for another window or other ranks than the case.
    """
    if plan.table.mask != "causal":
        raise ValueError(f"only causal plans can be simulated, this one's mask is {plan.table.mask!r}")
    if plan.table.window != case.window:
        both = plan.table.window, case.window
        plans, cases = ("whole documents" if w is None else f"a window of {w}" for w in both)
        raise ValueError(f"the plan is for {plans}, the case for {cases}")
    if plan.cp_size != case.cp_size:
        raise ValueError(f"the plan is for {plan.cp_size} ranks, the cluster has {case.cp_size}")
    return _Lowering(plan, case, backward).program(wait_for_room)


def priced_tokens(plan: Plan, messages: Messages) -> IntArray:
    """Tokens that each message is priced at, shape [num_messages]: whole blocks; what a window reaches of them."""
    if plan.table.window is None:
        return np.diff(messages.ptr) * plan.table.block_size
    return message_tokens(plan.table, messages)


class _Lowering:
    """Numbers the plan's messages, kernels and pushes, sorts them by when they are posted, and links them."""

    def __init__(self, plan: Plan, case: Case, backward: bool) -> None:
        self.plan, self.case, self.backward = plan, case, backward
        self.cost = case.cost(backward=backward)
        m, n = plan.schedule.messages, plan.cp_size
        self.stage = message_stages(plan.schedule)
        self.counts = np.diff(m.ptr)
        self.message = np.repeat(np.arange(len(m)), self.counts)  # of each transfer
        self.by_arrival = np.argsort(m.dst[self.message] * plan.table.num_blocks + m.block, kind="stable")
        if backward:
            self.call_ptr, self.call_stage, self.call = plan.calls.ptr, plan.calls.stage, plan.calls.of_transfer
        else:
            self.call_ptr = offsets([ends.size + 1 for ends in plan.schedule.stage_ends])
            self.call_stage = ranges(np.zeros(n, dtype=np.int64), np.diff(self.call_ptr))
            self.call = (self.call_ptr[m.dst] + self.stage)[self.message]
        self.call_rank = np.repeat(np.arange(n), np.diff(self.call_ptr))

    def program(self, wait_for_room: bool) -> Program:
        plan, m = self.plan, self.plan.schedule.messages
        push = plan.push if self.backward else None
        num_push = len(push.messages) if push else 0
        when = [plan.schedule.message_round * 4, self._called_after() * 4 + 1]
        if push:
            when.append(push.after_pull[push.message_round] * 4 + 2)
        order = np.argsort(np.concatenate(when), kind="stable")
        number = np.empty(order.size, dtype=np.int64)
        number[order] = np.arange(order.size)
        pull_op, call_op, push_op = np.split(number, [len(m), len(m) + self.call_rank.size])

        out = self._columns(order, num_push)
        first = self._first_calls()
        begins = first[m.dst, self.stage]
        parts = first[m.dst, self.stage + 1] - begins
        out.depend(call_op[ranges(begins, parts)], np.repeat(pull_op, parts))  # a part waits for its whole stage
        parent = self._parents(m.src[self.message], m.block)
        out.depend(pull_op[self.message], np.where(parent >= 0, pull_op[self.message[parent]], -1))
        if wait_for_room:
            self._link_room(out, pull_op, call_op, first)
        if push and num_push:
            self._link_pushes(out, call_op, push_op)
        return out.build()

    def _link_room(self, out: Builder, pull_op: IntArray, call_op: IntArray, first: IntArray) -> None:
        plan, m = self.plan, self.plan.schedule.messages
        for ranks, before in zip((m.src, m.dst), attended_when_posted(plan.schedule, plan.attended)):
            last = first[ranks, before + 1] - 1
            out.depend(pull_op, np.where(before > 0, call_op[last], -1))

    def _first_calls(self) -> IntArray:
        """First call of each rank's stages, shape [cp_size, most stages + 2]; behind a rank's last stage its end."""
        width = int(self.call_stage.max(initial=0)) + 2
        remote = np.flatnonzero(self.call_stage > 0)
        key = self.call_rank[remote] * width + self.call_stage[remote]
        count = np.bincount(key, minlength=self.plan.cp_size * width).reshape(-1, width)
        after = self.call_ptr[:-1, None] + 1 + np.cumsum(count, axis=1)  # the rank's first call is local
        return np.concatenate((self.call_ptr[:-1, None], after[:, :-1]), axis=1)

    def _called_after(self) -> IntArray:
        """Pull round after which each call is made, shape [num_calls]; the local stage's rest comes last."""
        last_round = np.full(self.call_rank.size, self.plan.schedule.num_rounds, dtype=np.int64)
        last_round[self.call_ptr[:-1]] = -1
        ends_ptr = offsets([ends.size for ends in self.plan.schedule.stage_ends])
        ends = np.concatenate(self.plan.schedule.stage_ends)
        remote = np.flatnonzero(self.call_stage > 0)
        last_round[remote] = ends[ends_ptr[self.call_rank[remote]] + self.call_stage[remote] - 1]
        return last_round

    def _columns(self, order: IntArray, num_push: int) -> Builder:
        """All operations with their prices, in ``order``, nothing linked yet."""
        plan, m = self.plan, self.plan.schedule.messages
        rank, stage = self.call_rank, self.call_stage
        calls = self._call_seconds()
        kind = [np.full(len(m), MESSAGE), np.full(rank.size, COMPUTE)]
        src, dst, stages = [m.src, rank], [m.dst, rank], [self.stage, stage]
        rounds = [plan.schedule.message_round, np.full(rank.size, -1)]
        size = [priced_tokens(plan, m) * self.cost.kv_bytes, np.zeros(rank.size, np.int64)]
        seconds = [self._message_seconds(m.src, m.dst, size[0]), calls]
        if num_push:
            p = plan.push.messages
            pushed = priced_tokens(plan, p) * self.cost.kv_bytes * PUSH_FACTOR
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

    def _call_seconds(self) -> FloatArray:
        plan, m = self.plan, self.plan.schedule.messages
        slowdown = self.case.slowdown()[self.call_rank]
        if plan.table.window is not None:
            return windowed_s(plan, self.cost, backward=self.backward) * slowdown
        owner = plan.placement.block_rank
        seconds = remote_s(plan.table, owner, m.dst[self.message], self.call, m.block, self.call_rank.size, self.cost)
        if self.backward:
            local = plan.calls.local
            np.add.at(seconds, self._local_calls(), pieces_s(local.start, local.stop, self.cost))
        else:
            seconds[self.call_ptr[:-1]] += local_s(plan.table, owner, plan.cp_size, self.cost)
        return seconds * slowdown

    def _local_calls(self) -> IntArray:
        """Call of each piece of the local stages: part 0 is a rank's first call, the others are its last."""
        calls, local = self.plan.calls, self.plan.calls.local
        rank = np.repeat(np.arange(self.plan.cp_size), np.diff(local.ptr))
        parts = np.bincount(self.call_rank[calls.stage == 0], minlength=self.plan.cp_size)
        return np.where(local.part == 0, self.call_ptr[rank], self.call_ptr[rank + 1] - parts[rank] + local.part)

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
        """A partial goes back once its call is through and those that its holder collects have come."""
        push = self.plan.push.messages
        nb = self.plan.table.num_blocks
        pushed = np.repeat(np.arange(len(push)), np.diff(push.ptr))
        pulled = self._parents(push.src[pushed], push.block)  # the transfer that brought what this one answers to
        out.depend(push_op[pushed], call_op[self.call[pulled]])
        sent, came = push.src[pushed] * nb + push.block, push.dst[pushed] * nb + push.block
        by_sender = np.argsort(sent)
        onward = by_sender[np.minimum(np.searchsorted(sent[by_sender], came), sent.size - 1)]
        collected = np.flatnonzero(sent[onward] == came)
        out.depend(push_op[pushed[onward[collected]]], push_op[pushed[collected]])
