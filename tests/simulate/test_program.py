"""The event simulator against cases worked out by hand, and against the planner's own pricing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.simulate import draw_lengths, load_hardware, price_plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import PUSH_FACTOR, plan_program
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.program import MESSAGE, Builder

pytestmark = pytest.mark.plan


def case(lengths: object, cp_size: int, tokens_per_rank: int = 4096, hardware: str = "h100-ib") -> Case:
    return Case(np.asarray(lengths), cp_size, tokens_per_rank, load_hardware(hardware))


def test_a_transfer_holds_both_ends_and_what_depends_on_it() -> None:
    b = Builder(3, 1)
    first = b.message(0, 1, 2.0, 10)
    second = b.message(0, 2, 3.0, 10)  # the same sender: after the first
    third = b.message(2, 1, 1.0, 10)  # the same receiver: after the first
    call = b.compute(2, 5.0)
    b.depend(call, second)
    timeline = b.build().run()
    assert timeline.start[[first[0], second[0], third[0], call[0]]].tolist() == [0.0, 2.0, 2.0, 5.0]
    assert timeline.makespan == 10.0
    assert timeline.bytes_moved(1, sends=True).tolist() == [20, 0, 10]
    assert timeline.finish.tolist() == [0.0, 3.0, 10.0]


def test_tiers_have_links_of_their_own() -> None:
    b = Builder(4, 2)
    b.message(0, 1, 4.0, 1)
    b.message(0, 2, 4.0, 1)
    assert b.build().run().makespan == 4.0


def test_a_join_waits_for_all() -> None:
    b = Builder(2, 1)
    calls = b.compute([0, 1], [1.0, 7.0])
    gate = b.join(calls)
    after = b.compute(0, 1.0)
    b.depend(after, gate)
    assert b.build().run().end[after[0]] == 8.0


def test_an_operation_cannot_depend_on_a_later_one() -> None:
    b = Builder(2, 1)
    calls = b.compute([0, 1], 1.0)
    with pytest.raises(AssertionError):
        b.depend(calls[0], calls[1])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=12),
    cp_size=st.sampled_from([1, 2, 4, 8]),
    block=st.sampled_from([256, 1024]),
    hardware=st.sampled_from(["flat5920", "h100-ib"]),
    planner=st.booleans(),
)
def test_forward_agrees_with_the_planners_pricing(
    lengths: list[int], cp_size: int, block: int, hardware: str, planner: bool
) -> None:
    tokens = -(-sum(lengths) // (cp_size * 1024)) * 1024
    c = case(lengths, cp_size, tokens, hardware)
    config = FcpConfig(block_size=block, ranks_per_node=c.hardware.ranks_per_node)
    if planner:
        plan = fcp_plan(c, config)
    else:
        plan = make_plan(lengths, cp_size=cp_size, tokens_per_rank=tokens, config=config)
    price, timeline = price_plan(plan, c.forward), plan_program(plan, c).run()
    np.testing.assert_allclose(timeline.makespan, price.makespan, rtol=1e-9)
    np.testing.assert_allclose(timeline.compute, price.compute, rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(timeline.bytes_moved(1, sends=False), price.bytes_received[1])
    np.testing.assert_allclose(c.ideal(), price.ideal, rtol=1e-9)


@pytest.fixture(scope="module")
def planned() -> tuple[Case, Plan]:
    c = case(draw_lengths("longtail", num_tokens=16 * 8192, seed=3), 16, 8192)
    return c, fcp_plan(c)


def test_backward_pulls_once_more_and_pushes_twice_the_bytes_back(planned: tuple[Case, Plan]) -> None:
    c, plan = planned
    forward, backward = plan_program(plan, c), plan_program(plan, c, backward=True)
    for tier in (0, 1):
        pulled = forward.run().bytes_moved(tier, sends=False).sum()
        assert backward.run().bytes_moved(tier, sends=False).sum() == pulled * (1 + PUSH_FACTOR)
    ratio = backward.run().compute.sum() / forward.run().compute.sum()
    assert 1 <= ratio * c.hardware.backward_rate / 2.5 < 1.08  # finer cuts have more rim


def test_partials_leave_after_their_stage_and_after_those_they_collect(planned: tuple[Case, Plan]) -> None:
    c, plan = planned
    program = plan_program(plan, c, backward=True)
    timeline = program.run()
    pushes = np.flatnonzero((program.kind == MESSAGE) & (program.stage < 0))
    assert pushes.size
    for op in pushes.tolist():
        before = program.dep[program.dep_ptr[op] : program.dep_ptr[op + 1]]
        assert before.size
        assert timeline.start[op] >= timeline.end[before].max() - 1e-12


@pytest.mark.parametrize("backward", [False, True])
def test_who_passes_blocks_on_waits_for_no_room_and_owners_hold_two_stages(backward: bool) -> None:
    c = case(draw_lengths("longtail", num_tokens=16 * 8192, seed=2), 16, 8192, "flat5920")
    relayed = fcp_plan(c)
    by_owners = make_plan(c.lengths, cp_size=16, tokens_per_rank=8192)
    for plan, waits in ((relayed, False), (by_owners, True)):
        assert max(ends.size for ends in plan.schedule.stage_ends) > 2
        free = plan_program(plan, c, backward=backward).run()
        as_run = plan_program(plan, c, backward=backward, wait_for_room=True).run()
        assert (as_run.makespan > free.makespan) == waits


def test_a_slow_rank_takes_longer_in_proportion(planned: tuple[Case, Plan]) -> None:
    c, plan = planned
    speed = np.ones(16)
    speed[5] = 0.5
    slow = dataclasses.replace(c, speed=speed)
    before, after = plan_program(plan, c).run().compute, plan_program(plan, slow).run().compute
    expected = np.ones(16)
    expected[5] = 2.0
    np.testing.assert_allclose(after / before, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": np.ones(3)}, "3 rank speeds were given for 16 ranks"),
        ({"speed": np.append(np.ones(15), 0.0)}, "speed of rank 15 must be positive"),
        ({"tokens_per_rank": 100}, "have room for 1600"),
        ({"cp_size": 0}, "--cp-size must be an integer of at least 1"),
    ],
)
def test_cases_that_cannot_be(planned: tuple[Case, Plan], change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned[0].replace(**change)


def test_plans_that_cannot_be_lowered(planned: tuple[Case, Plan]) -> None:
    c, plan = planned
    with pytest.raises(ValueError, match="16 ranks, the cluster has 8"):
        plan_program(plan, case([4096], 8, 8192))
    full = make_plan([4096], cp_size=16, tokens_per_rank=8192, config=FcpConfig(mask="full"))
    with pytest.raises(ValueError, match="only causal"):
        plan_program(full, c)
