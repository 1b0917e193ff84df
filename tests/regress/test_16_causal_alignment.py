"""Causal masks between blocks: only the pair of a block with itself is causal, and masks align at the bottom right.

https://github.com/Dao-AILab/flash-attention/issues/1778, https://github.com/Dao-AILab/flash-attention/issues/282
"""

from itertools import permutations

import pytest

from megatron_fcp.config import FcpConfig, Mask
from megatron_fcp.plan import Placement, Plan, build_block_table, make_plan
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.schedule import schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.testing.attention_check import check_in_threads

pytestmark = pytest.mark.runtime


def placed(owners: tuple[int, ...], mask: Mask) -> Plan:
    """A document of 10 tokens in blocks of 4, 4 and 2, owned as told; the last block holds padding only."""
    cp_size = max(owners) + 1
    table = build_block_table([10], num_tokens=16, block_size=4, mask=mask)
    placement = Placement(cp_size, frozen(owners))
    rank, block = needed_blocks(table, placement)
    return Plan(table, placement, schedule_rounds(coalesce(rank, block, placement, 1), cp_size))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_every_pair_of_blocks_on_every_pair_of_ranks(mask: Mask) -> None:
    for owners in sorted({*permutations((0, 0, 1, 1)), *permutations(range(4))}):
        check_in_threads(placed(owners, mask))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_documents_that_begin_and_end_inside_blocks(cp_size: int) -> None:
    for first in range(9):
        config = FcpConfig(block_size=4)
        plan = make_plan([first, 10, 3], cp_size=cp_size, tokens_per_rank=32 // cp_size, config=config)
        check_in_threads(plan)
