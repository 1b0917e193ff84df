"""A group call of very many sends and receives is split differently by each rank, and hangs.

https://github.com/pytorch/pytorch/issues/174288
"""

import pytest

from megatron_fcp.plan import Placement, Plan, build_block_table
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.schedule import schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.runtime import Communicator
from megatron_fcp.runtime.rounds import MAX_OPS_PER_PEER
from megatron_fcp.testing.attention_check import (
    TOLERANCE,
    Model,
    RankResult,
    gather,
    largest_errors,
    random_inputs,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.gloo_pool import GlooPool

pytestmark = pytest.mark.runtime

BLOCKS = 300
MODEL = Model(num_heads=1, num_kv_heads=1, head_dim_qk=4, head_dim_v=4)


def alternating() -> Plan:
    """Documents of two tokens across every block edge, blocks owned in turn: one message of 150 scattered tokens."""
    table = build_block_table([1] + [2] * (BLOCKS - 1), num_tokens=2 * BLOCKS, block_size=2)
    placement = Placement(2, frozen([b % 2 for b in range(BLOCKS)]))
    rank, block = needed_blocks(table, placement)
    return Plan(table, placement, schedule_rounds(coalesce(rank, block, placement, BLOCKS), 2))


def attend(comm: Communicator) -> RankResult:
    return run_rank(comm, alternating(), MODEL, random_inputs(alternating(), MODEL, 0))


def test_a_message_of_many_segments(gloo: GlooPool) -> None:
    plan = alternating()
    segments = max(len(t.segments) for s in plan.rank_plan(1).forward for t in getattr(s, "recvs", ()))
    assert 2 * segments > 4 * MAX_OPS_PER_PEER, "K and V of every segment need several group calls"
    want = right_answer(plan, MODEL, random_inputs(plan, MODEL, 0))
    got = gather(gloo.run(2, attend), want)
    assert max(largest_errors(plan, got, want).values()) < TOLERANCE
