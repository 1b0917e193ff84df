"""Plans for hardware: valid and right on thousands of random streams, deterministic, as few rounds as can be."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.blocks import build_block_table
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.makespan import block_sizes_to_try, choose_block_size, place_and_schedule
from megatron_fcp.plan.schedule import rounds_lower_bound
from megatron_fcp.testing.audit import audit
from megatron_fcp.testing.oracle import TOLERANCE, largest_error
from megatron_fcp.testing.streams import Case, random_case

pytestmark = pytest.mark.plan

CHUNK, CHUNKS, NIGHTLY = 500, 10, 200  # 5,000 plans in every run, 100,000 in nightly ones
EXECUTED = 5  # every fifth plan is executed as well


def random_cost(rng: np.random.Generator, ranks_per_node: int) -> CostModel:
    """Hardware from compute-bound to hopelessly slow networks, at the scale of streams of a few hundred tokens."""
    return CostModel(
        pair_s=10.0 ** -rng.integers(6, 10),
        q_half=float(rng.choice([1, 10, 100])),
        kv_half=float(rng.choice([1, 10, 100])),
        kv_bytes=4096,
        inter_bytes_per_s=10.0 ** rng.integers(6, 11),
        intra_bytes_per_s=10.0 ** rng.integers(7, 12),
        latency_s=float(rng.choice([0.0, 1e-5])),
        ranks_per_node=ranks_per_node,
    )


def plan_for(case: Case, cost: CostModel) -> Plan:
    return make_plan(
        case.lengths,
        starts=case.starts,
        cp_size=case.cp_size,
        tokens_per_rank=case.tokens_per_rank,
        config=case.config,
        hardware=cost,
    )


def forwards(plan: Plan) -> bool:
    m = plan.schedule.messages
    return bool((plan.placement.block_rank[m.block] != np.repeat(m.src, np.diff(m.ptr))).any())


@pytest.mark.parametrize(
    "chunk", [*range(CHUNKS), *(pytest.param(c, marks=pytest.mark.nightly) for c in range(CHUNKS, NIGHTLY))]
)
def test_plans_for_hardware_are_valid_and_right(chunk: int) -> None:
    forwarding = 0
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        rng = np.random.default_rng([3, seed])
        case = random_case(rng, max_cp_size=13, max_blocks_per_rank=9)
        plan = plan_for(case, random_cost(rng, case.config.ranks_per_node))
        degree = audit(case, plan)
        assert plan.table.block_size == case.config.block_size
        assert plan.ranks_per_node == case.config.ranks_per_node
        if forwards(plan):
            forwarding += 1
        else:
            assert plan.schedule.num_rounds == degree, (seed, case)
        assert rounds_lower_bound(plan.schedule.messages, plan.ranks_per_node) == degree, (seed, case)
        if seed % EXECUTED == 0:
            assert largest_error(plan, rng) < TOLERANCE, (seed, case)
    assert forwarding > CHUNK // 10  # or this would test little


COST = CostModel(5e-11, 100, 100, 4096, 45e9, 300e9, 1e-5, 8)


def test_the_same_stream_gives_the_same_plan() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1.5, 150), 60000).astype(np.int64)
    lengths = lengths[np.cumsum(lengths) <= 16 * 16384]
    one, two = (make_plan(lengths, cp_size=16, tokens_per_rank=16384, hardware=COST) for _ in range(2))
    assert one.digest == two.digest
    assert forwards(one)


@pytest.mark.parametrize(
    ("longest", "tokens_per_rank", "expected"),
    [
        (300, 32768, 512),  # nothing to balance: the largest
        (400000, 32768, 256),  # a rank's share of the compute is under 1,000 queries at the end of the longest document
        (400000, 100, 100),
        (400000, 5 * 77, 385),
    ],
)
def test_blocks_are_small_enough_to_balance_the_longest_document(
    longest: int, tokens_per_rank: int, expected: int
) -> None:
    lengths = np.array([longest] + [1000] * 7900)
    assert choose_block_size(lengths, 256, tokens_per_rank, COST) == expected


def test_an_empty_stream_and_one_rank_can_be_planned() -> None:
    assert make_plan([], cp_size=4, tokens_per_rank=1024, hardware=COST).schedule.num_rounds == 0
    assert make_plan([700, 0, 300], cp_size=1, tokens_per_rank=1024, hardware=COST).schedule.num_rounds == 0


def test_a_full_mask_is_planned_without_the_hardware() -> None:
    config = FcpConfig(mask="full", block_size=128)
    plan = make_plan([5000, 100], cp_size=4, tokens_per_rank=2048, config=config, hardware=COST)
    assert plan.digest == make_plan([5000, 100], cp_size=4, tokens_per_rank=2048, config=config).digest


def test_larger_blocks_are_tried_only_where_latencies_count() -> None:
    lengths = np.array([10000] + [800] * 60)
    slow = replace(COST, latency_s=0.0)
    assert block_sizes_to_try(lengths, 8, 8192, slow) == [choose_block_size(lengths, 8, 8192, slow)]
    far = replace(COST, latency_s=1.0)
    first, *others = block_sizes_to_try(lengths, 8, 8192, far)
    assert first == choose_block_size(lengths, 8, 8192, far)
    assert others == [2 * first, 4 * first, 8 * first, 8192]  # the last: a whole rank, since a latency is all there is
    # 471 us of compute per rank are less than 500 latencies of 6 us and more than 20
    assert block_sizes_to_try(lengths, 8, 8192, replace(COST, latency_s=6e-6)) == [first, *others[:3]]


@pytest.mark.parametrize("latency_s", [1e-6, 1e-5, 1e-4])
def test_the_plan_of_the_earliest_end_is_chosen(latency_s: float) -> None:
    lengths = np.array([10000] + [800] * 60)
    cost = replace(COST, latency_s=latency_s, pair_s=COST.pair_s / 8, kv_bytes=COST.kv_bytes // 8)
    ends = {}
    for size in block_sizes_to_try(lengths, 8, 8192, cost):
        table = build_block_table(lengths, num_tokens=8 * 8192, block_size=size)
        ends[size] = place_and_schedule(table, 8, cost)[2].finish.max()
    assert len(ends) > 1
    plan = make_plan(lengths, cp_size=8, tokens_per_rank=8192, hardware=cost)
    assert plan.table.block_size == min(ends, key=lambda size: ends[size])
