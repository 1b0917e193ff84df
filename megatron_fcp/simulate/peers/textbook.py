"""FCP as its paper describes it: blocks, LPT on compute, congestion-free rounds, sixteen merged.

Source: arXiv 2605.08524. Every needed KV block is sent by its owner; all ranks own the same number of blocks.
"""

from __future__ import annotations

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan.blocks import build_block_table
from megatron_fcp.plan.placement import place_blocks
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.schedule import schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.program import Program

BLOCK = 4096  # tokens, the paper's choice
BLOCKS_PER_MESSAGE = 16


def textbook_plan(case: Case, block_size: int = BLOCK) -> Plan:
    """The textbook plan with blocks of ``block_size`` (or the largest legal size below)."""
    size = FcpConfig(block_size=None).resolve_block_size(case.tokens_per_rank)
    if case.tokens_per_rank % block_size == 0:
        size = block_size
    table = build_block_table(case.lengths, num_tokens=case.cp_size * case.tokens_per_rank, block_size=size)
    placement = place_blocks(table, case.cp_size)
    rank, block = needed_blocks(table, placement)
    nodes = case.hardware.ranks_per_node
    messages = coalesce(rank, block, placement, BLOCKS_PER_MESSAGE)
    return Plan(table, placement, schedule_rounds(messages, case.cp_size, ranks_per_node=nodes), nodes)


def textbook(case: Case, *, backward: bool = False) -> Program:
    """The textbook plan, lowered."""
    return plan_program(textbook_plan(case), case, backward=backward)
