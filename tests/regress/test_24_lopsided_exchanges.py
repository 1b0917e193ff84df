"""Ranks that only send or only receive, ranks that dawdle, and transports that buffer nothing: no deadlock.

https://github.com/NVIDIA/nccl/issues/2130, https://github.com/NVIDIA/nccl/issues/1487
"""

import itertools
import time
from collections.abc import Sequence

import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Placement, Plan, build_block_table
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.schedule import schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.runtime.transport import Message, Pending, Transport
from megatron_fcp.testing.attention_check import (
    TOLERANCE,
    Model,
    gather,
    largest_errors,
    random_inputs,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

MODEL = Model(num_heads=1, num_kv_heads=1, head_dim_qk=4, head_dim_v=4)


def lopsided() -> Plan:
    """Rank 0 owns the beginning of a document, rank 3 its end: one only sends, one only receives."""
    config = FcpConfig(block_size=2, blocks_per_message=1)
    table = build_block_table([30, 2], num_tokens=32, block_size=2)
    placement = Placement(4, frozen([0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 1, 2, 3, 3, 3, 3]))
    rank, block = needed_blocks(table, placement)
    messages = coalesce(rank, block, placement, config.blocks_per_message)
    return Plan(table, placement, schedule_rounds(messages, 4, rounds_per_stage=2))


class Slow:
    """Sleeps before every round, on a pattern of its own."""

    def __init__(self, comm: Transport, naps: tuple[float, ...]) -> None:
        self._comm, self._naps = comm, itertools.cycle(naps)
        self.rank, self.size, self.position, self.in_order = comm.rank, comm.size, comm.position, comm.in_order

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        time.sleep(next(self._naps))
        return self._comm.post(sends, recvs)


@pytest.mark.parametrize("slow", range(4))
def test_sends_block_until_they_are_received_and_one_rank_is_late(slow: int) -> None:
    plan = lopsided()
    kinds = [{bool(s.sends): bool(s.recvs) for s in plan.rank_plan(r).forward if hasattr(s, "sends")} for r in (0, 3)]
    assert kinds == [{True: False}, {False: True}]
    x = random_inputs(plan, MODEL, 0)
    want = right_answer(plan, MODEL, x)
    naps = [(0.0,)] * 4
    naps[slow] = (0.01, 0.0, 0.03)
    got = run_ranks(4, lambda comm: run_rank(Slow(comm, naps[comm.rank]), plan, MODEL, x), mode="rendezvous")
    assert max(largest_errors(plan, gather(got, want), want).values()) < TOLERANCE
