"""The same input gives the same plan, bit for bit; other decisions give another digest."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.testing.forwarding import reroute, with_random_stages
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.plan

CONFIG = FcpConfig(block_size=4)


def digests(seeds: range) -> list[str]:
    return [random_case(np.random.default_rng(seed)).plan().digest for seed in seeds]


def test_twice_in_this_process_and_once_in_another() -> None:
    here = digests(range(200))
    assert digests(range(200)) == here
    assert len(set(here)) > 150
    program = "import sys, test_plan_digest as t; sys.stdout.write(' '.join(t.digests(range(200))))"
    environment = dict(os.environ, PYTHONHASHSEED="7", PYTHONPATH=os.path.dirname(__file__))
    there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.split() == here


def test_planning_leaves_torch_alone() -> None:
    program = (
        "import sys, megatron_fcp.plan as plan; "
        "plan.make_plan([9, 3], cp_size=2, tokens_per_rank=8).rank_plan(1); "
        "print([m for m in ('torch', 'megatron') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("lengths", [[5, 4, 0, 0], [0, 5, 4], [5, 0, 0, 4, 0]])
def test_empty_documents_change_nothing(lengths: list[int]) -> None:
    want = make_plan([5, 4], cp_size=3, tokens_per_rank=8, config=CONFIG)
    got = make_plan(lengths, cp_size=3, tokens_per_rank=8, config=CONFIG)
    assert got.digest == want.digest
    assert all(got.rank_plan(r).forward == want.rank_plan(r).forward for r in range(3))


def test_starts_that_leave_no_gap_change_nothing() -> None:
    want = make_plan([5, 4], cp_size=3, tokens_per_rank=8, config=CONFIG)
    assert make_plan([5, 4], starts=[0, 5], cp_size=3, tokens_per_rank=8, config=CONFIG).digest == want.digest
    assert make_plan([5, 4], starts=[0, 6], cp_size=3, tokens_per_rank=8, config=CONFIG).digest != want.digest


def test_every_decision_is_in_the_digest() -> None:
    plan = make_plan([60, 3, 20], cp_size=4, tokens_per_rank=24, config=CONFIG)
    one_more = dataclasses.replace(plan.schedule, num_rounds=plan.schedule.num_rounds + 1)
    others: list[Plan] = [
        plan,
        make_plan([60, 3, 21], cp_size=4, tokens_per_rank=24, config=CONFIG),
        make_plan([60, 23], cp_size=4, tokens_per_rank=24, config=CONFIG),
        make_plan([60, 3, 20], cp_size=4, tokens_per_rank=24, config=FcpConfig(block_size=4, mask="full")),
        make_plan([60, 3, 20], cp_size=4, tokens_per_rank=24, config=FcpConfig(block_size=8)),
        make_plan([60, 3, 20], cp_size=4, tokens_per_rank=24, config=FcpConfig(block_size=4, rounds_per_stage=2)),
        make_plan([60, 3, 20], cp_size=4, tokens_per_rank=24, config=FcpConfig(block_size=4, ranks_per_node=2)),
        make_plan([60, 3, 20], cp_size=4, tokens_per_rank=24, config=FcpConfig(block_size=4, blocks_per_message=1)),
        make_plan([60, 3, 20], cp_size=2, tokens_per_rank=48, config=CONFIG),
        Plan(plan.table, plan.placement, one_more),
        reroute(plan, np.random.default_rng(0)),
        with_random_stages(plan, np.random.default_rng(0)),
    ]
    assert len({p.digest for p in others}) == len(others)


def test_arrays_of_a_plan_are_read_only() -> None:
    plan = make_plan([60, 3, 20], cp_size=4, tokens_per_rank=24, config=CONFIG)
    rank_plan = plan.rank_plan(2)
    values = (plan.table, plan.placement, plan.schedule.messages, plan.schedule, rank_plan, *rank_plan.stages)
    arrays = [v for part in values for v in vars(part).values() if isinstance(v, np.ndarray)]
    assert len(arrays) > 30
    assert not any(array.flags.writeable for array in arrays)


def test_frozen_copies() -> None:
    mine = np.arange(3)
    theirs = frozen(mine)
    mine[0] = 7
    assert theirs.tolist() == [0, 1, 2]
