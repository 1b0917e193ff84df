"""This project's own plans, chosen for the case's hardware."""

from __future__ import annotations

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan.plan import Plan, make_plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.program import Program


def fcp_plan(case: Case, config: FcpConfig | None = None) -> Plan:
    """The planner's plan for the case's hardware and window; ``config`` overrides the block size it would choose."""
    return make_plan(
        case.lengths, cp_size=case.cp_size, tokens_per_rank=case.tokens_per_rank, config=config, hardware=case.forward,
        window=case.window,
    )  # fmt: skip


def fcp(case: Case, *, backward: bool = False) -> Program:
    """The planner's plan, lowered."""
    return plan_program(fcp_plan(case), case, backward=backward)
