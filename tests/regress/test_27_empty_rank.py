"""A rank without any real token still takes part in every round, and its gradients are zero, not None.

https://github.com/SandAI-org/MagiAttention/issues/9
"""

import pytest
import torch

from megatron_fcp.config import FcpConfig, Mask
from megatron_fcp.plan import Placement, Plan, build_block_table
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.schedule import schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.runtime import Communicator
from megatron_fcp.testing.attention_check import Model, check_in_threads, random_inputs, run_rank
from megatron_fcp.testing.gloo_pool import GlooPool

pytestmark = pytest.mark.runtime

EMPTY = 2


def plan_with_an_empty_rank(mask: Mask = "causal") -> Plan:
    """Rank 2 of 4 owns padding only; the others share two documents."""
    config = FcpConfig(block_size=2, blocks_per_message=1)
    table = build_block_table([9, 2], num_tokens=16, block_size=2, mask=mask)
    placement = Placement(4, frozen([0, 1, 3, 0, 1, 3, EMPTY, EMPTY]))
    rank, block = needed_blocks(table, placement)
    messages = coalesce(rank, block, placement, config.blocks_per_message)
    return Plan(table, placement, schedule_rounds(messages, 4))


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_everyone_is_right(mask: Mask, layout: str) -> None:
    check_in_threads(plan_with_an_empty_rank(mask), Model(layout=layout))  # type: ignore[arg-type]


def grads(comm: Communicator) -> tuple[list[torch.Tensor], int]:
    posted = 0
    original = comm.post

    def counted(sends, recvs):  # type: ignore[no-untyped-def]
        nonlocal posted
        posted += 1
        return original(sends, recvs)

    comm.post = counted  # type: ignore[method-assign]
    plan, model = plan_with_an_empty_rank(), Model(layout="reshuffle")
    result = run_rank(comm, plan, model, random_inputs(plan, model, 0))
    return [result.out, result.dq, result.dk, result.dv], posted


def test_over_gloo_the_empty_rank_joins_the_rounds_of_the_reshuffle(gloo: GlooPool) -> None:
    results = gloo.run(4, grads)
    for tensors, _ in results:
        assert all(t is not None and not t.isnan().any() for t in tensors)
    plan = plan_with_an_empty_rank()
    assert not plan.rank_plan(EMPTY).stages[0].num_items
    assert results[EMPTY][1] > 0
