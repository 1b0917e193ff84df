"""ROOM 1: every decision. numpy and the standard library (numba where it pays), no torch.

::

    lengths -> blocks -> placement -> transfers -> schedule -> rank_plan -> program
               cut       who owns     what moves   which round  one rank's   steps in
                                                                 work        order

Beside that line: ``backward`` reverses the rounds, ``layout`` says where the tokens of every message lie, ``validate``
holds the rules, ``planfile`` writes and reads plan files, and ``report`` works out a plan's figures. ``window`` and
``strips`` say what a sliding window changes about work and placement.
"""

from megatron_fcp.plan.blocks import BlockTable, build_block_table
from megatron_fcp.plan.placement import Placement, place_blocks
from megatron_fcp.plan.plan import Plan, make_plan, with_window
from megatron_fcp.plan.rank_plan import RankPlan
from megatron_fcp.plan.schedule import CommSchedule

__all__ = [
    "BlockTable",
    "CommSchedule",
    "Placement",
    "Plan",
    "RankPlan",
    "build_block_table",
    "make_plan",
    "place_blocks",
    "with_window",
]
