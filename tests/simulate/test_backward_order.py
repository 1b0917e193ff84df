"""Pushes in the order of a rough clock: every partial goes home over its edge, in valid rounds, collected before."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fcp.plan import Plan
from megatron_fcp.plan.backward import PushSchedule, reverse_schedule
from megatron_fcp.plan.push_order import push_by_arrival
from megatron_fcp.plan.schedule import tier_of
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.testing.forwarding import reroute

pytestmark = pytest.mark.plan


def planned(workload: str, cp_size: int, hardware: str) -> Plan:
    lengths = draw_lengths(workload, num_tokens=cp_size * 32768, seed=0)
    return fcp_plan(Case(lengths, cp_size, 32768, load_hardware(hardware)))


def check(plan: Plan, push: PushSchedule) -> None:
    """Every pulled block comes back over its edge, in rounds without two sends or receives per tier."""
    pulls, back = plan.schedule.messages, push.messages
    pulled = np.stack([np.repeat(pulls.src, np.diff(pulls.ptr)), np.repeat(pulls.dst, np.diff(pulls.ptr)), pulls.block])
    pushed = np.stack([np.repeat(back.dst, np.diff(back.ptr)), np.repeat(back.src, np.diff(back.ptr)), back.block])
    np.testing.assert_array_equal(pulled[:, np.lexsort(pulled)], pushed[:, np.lexsort(pushed)])
    assert (np.diff(push.message_round) >= 0).all()
    assert (np.diff(push.after_pull) >= 0).all()
    tier = tier_of(back.src, back.dst, plan.ranks_per_node)
    for rank in (back.src, back.dst):
        slot = (push.message_round * 2 + tier) * plan.cp_size + rank
        assert np.unique(slot).size == slot.size
    round_of = dict(zip(zip(pushed[0].tolist(), pushed[1].tolist(), pushed[2].tolist()), _rounds(push)))
    owner = plan.placement.block_rank
    above = {(int(d), int(b)): int(s) for s, d, b in pulled.T}
    for (src, dst, block), round_ in round_of.items():  # a holder collects before it sends on
        if owner[block] != src:
            assert round_ < round_of[above[src, block], src, block], (src, dst, block)


def _rounds(push: PushSchedule) -> list[int]:
    return np.repeat(push.message_round, np.diff(push.messages.ptr)).tolist()


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_rerouted_plans(seed: int, hardware: str) -> None:
    plan = planned("longtail", 8, hardware)
    plan = reroute(plan, np.random.default_rng(seed))
    check(plan, push_by_arrival(plan.table, plan.placement, plan.schedule, plan.ranks_per_node))


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("workload", ["longtail", "bimodal"])
def test_rounds_of_our_plans(workload: str, hardware: str) -> None:
    plan = planned(workload, 32, hardware)
    push = push_by_arrival(plan.table, plan.placement, plan.schedule, plan.ranks_per_node)
    check(plan, push)
    again = push_by_arrival(plan.table, plan.placement, plan.schedule, plan.ranks_per_node)
    np.testing.assert_array_equal(push.message_round, again.message_round)
    np.testing.assert_array_equal(push.messages.block, again.messages.block)
    # far fewer rounds than colouring one group after the other
    assert push.num_rounds < reverse_schedule(plan.schedule, plan.placement, plan.ranks_per_node).num_rounds
