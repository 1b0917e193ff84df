"""What a limit of held KV costs: little, and little more the lower it is."""

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.bounded import received_tokens, within_limit
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.memory import busiest_rank, held_bound, held_tokens

TOKENS = 32768
RANKS = 32


@pytest.mark.parametrize("workload", ["bimodal", "longtail"])
def test_efficiency_falls_slowly_with_the_limit(workload: str) -> None:
    lengths = draw_lengths(workload, num_tokens=RANKS * TOKENS, seed=0)
    case = Case(lengths, RANKS, TOKENS, load_hardware("h100-ib"))

    def make(limit: int | None) -> Plan:
        config = FcpConfig(kv_buffer_tokens=limit)
        return make_plan(lengths, cp_size=RANKS, tokens_per_rank=TOKENS, config=config, hardware=case.forward)

    def efficiency(plan: Plan) -> list[float]:
        runs = [plan_program(plan, case, backward=b, wait_for_room=True) for b in (False, True)]
        return [case.efficiency(run, backward=b) for run, b in zip(runs, (False, True))]

    free = make(None)
    nodes = free.ranks_per_node
    busiest = int(received_tokens(free.table, free.schedule, RANKS).max())
    limits = (busiest - 1, busiest // 2, busiest // 4)
    plans = [make(limit) for limit in limits]
    by_owners = [
        Plan(free.table, free.placement, within_limit(free.table, free.placement, nodes, limit, 16), nodes)
        for limit in limits
    ]
    for plan, limit in zip(plans, limits):
        assert plan.schedule.waves is not None
        check_memory(plan, limit)
    without, got = np.array(efficiency(free)), np.array([efficiency(p) for p in plans])
    assert (got[0] > without - 0.04).all()
    assert (got[:, 0] > without[0] - 0.05).all()
    assert (got > np.array([efficiency(p) for p in by_owners]) + 0.15).all()


def check_memory(plan: Plan, limit: int) -> None:
    """The busiest rank is the busiest, and no rank is over the limit."""
    rank, held = busiest_rank(plan)
    exact = [held_tokens(plan, r) for r in range(RANKS)]
    assert (held, held) == (exact[rank], max(exact))
    assert (held_bound(plan) >= exact).all()
    assert all(plan.rank_plan(r).peak_backward.kv_tokens <= limit for r in range(RANKS))
