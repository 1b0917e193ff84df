"""Backward's calls and push rounds: everything once, in valid rounds, collected before it is passed on, and fast."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fcp.plan import Plan, calls, make_plan
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.schedule import tier_of
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.oracle import TOLERANCE, largest_error
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.plan

COST = CostModel(1e-8, 10, 10, 4096, 1e9, 8e9, 1e-5, 2)


def planned(workload: str, cp_size: int, hardware: str) -> tuple[Case, Plan]:
    lengths = draw_lengths(workload, num_tokens=cp_size * 32768, seed=0)
    case = Case(lengths, cp_size, 32768, load_hardware(hardware))
    return case, fcp_plan(case)


def check_pushes(plan: Plan) -> int:
    """Every partial leaves its holder once, after those that it collects; returns the longest way home in hops."""
    pulls, push = plan.schedule.messages, plan.push
    back, owner = push.messages, plan.placement.block_rank.tolist()
    counts = np.diff(back.ptr)
    src, dst, round_of = (np.repeat(a, counts).tolist() for a in (back.src, back.dst, push.message_round))
    way = {(s, b): (d, r) for s, d, b, r in zip(src, dst, back.block.tolist(), round_of)}
    assert len(way) == back.block.size
    assert set(way) == set(zip(np.repeat(pulls.dst, np.diff(pulls.ptr)).tolist(), pulls.block.tolist()))
    assert (np.diff(push.message_round) >= 0).all()
    assert (np.diff(push.after_pull) >= 0).all()
    tier = tier_of(back.src, back.dst, plan.ranks_per_node)
    for rank in (back.src, back.dst):
        slot = (push.message_round * 2 + tier) * plan.cp_size + rank
        assert np.unique(slot).size == slot.size
    longest = 0
    for (_, block), (holder, round_) in way.items():
        hops = 1
        while holder != owner[block]:
            following, later = way[holder, block]
            assert round_ < later, (holder, block)
            holder, round_, hops = following, later, hops + 1
        longest = max(longest, hops)
    return longest


@pytest.fixture(params=[2048, 8])
def least_part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of the smallest part of a stage; small enough that small streams are cut as well."""
    monkeypatch.setattr(calls, "LEAST_PART", request.param)
    return request.param


def small_plan(seed: int) -> Plan:
    rng = np.random.default_rng([7, seed])
    case = random_case(rng, max_cp_size=9, max_blocks_per_rank=9)
    plan = make_plan(
        case.lengths, starts=case.starts, cp_size=case.cp_size, tokens_per_rank=case.tokens_per_rank,
        config=case.config, hardware=None if seed % 3 == 0 else COST,
    )  # fmt: skip
    return plan if seed % 3 == 2 else reroute(plan, rng)


@pytest.mark.parametrize("window", [1, None])
def test_gradients_are_right_however_finely_stages_are_cut(least_part: int, window: int | None) -> None:
    parts, pieces = 0, 0
    for seed in range(150):
        plan = small_plan(seed)
        check_pushes(plan)
        assert largest_error(plan, np.random.default_rng(seed), window=window) < TOLERANCE, seed
        parts = max(parts, int(plan.calls.part[plan.calls.stage > 0].max(initial=0)) + 1)
        pieces = max(pieces, int(plan.calls.part[plan.calls.stage == 0].max(initial=0)) + 1)
    assert pieces == calls.STEPS.size
    assert (parts > 4) == (least_part == 8)


@pytest.mark.usefixtures("least_part")
def test_parts_of_a_stage_are_the_stage() -> None:
    for seed in range(150):
        plan = small_plan(seed)
        for rank in range(plan.cp_size):
            rank_plan = plan.rank_plan(rank)
            for stage, parts in zip(rank_plan.stages, rank_plan.parts):
                works = [work for part in parts for work in part]
                assert sum(work.pairs for work in works) == stage.pairs
                assert all((w.q_start < w.q_stop).all() and (w.kv_start < w.kv_stop).all() for w in works)
        if plan.table.mask == "causal":
            works = [stage for rank in range(plan.cp_size) for stage in plan.rank_plan(rank).stages]
            assert plan.calls.pairs.sum() == sum(work.pairs for work in works)


@pytest.mark.parametrize(("hardware", "hops"), [("flat5920", 6), ("h100-ib", 4)])
def test_ways_home_are_short_and_pushes_hidden(hardware: str, hops: int) -> None:
    """Of 32 ranks: five hops between nodes of one rank; two between four nodes and one inside."""
    case, plan = planned("longtail", 32, hardware)
    assert check_pushes(plan) <= hops
    program = plan_program(plan, case, backward=True)
    timeline = program.run()
    kernels = timeline.compute.max()
    assert timeline.makespan < 1.05 * kernels


def test_the_same_plan_gives_the_same_rounds() -> None:
    one, two = (planned("longtail", 16, "h100-ib")[1] for _ in range(2))
    np.testing.assert_array_equal(one.push.message_round, two.push.message_round)
    np.testing.assert_array_equal(one.push.messages.block, two.push.messages.block)
    np.testing.assert_array_equal(one.calls.pairs, two.calls.pairs)
