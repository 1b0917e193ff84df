"""Rounds without congestion, as few as possible, and the stages cut from them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.coloring import color_edges, max_degree
from megatron_fcp.plan.schedule import cut_stages, rounds_lower_bound, schedule_rounds
from megatron_fcp.plan.transfers import Messages, coalesce, needed_blocks

pytestmark = pytest.mark.plan

TRAP = [(0, 3), (0, 4), (1, 3), (2, 4)]  # A-x, A-y, B-x, C-y


def degree(edges: list[tuple[int, int]]) -> int:
    counts = [*Counter(s for s, _ in edges).values(), *Counter(d for _, d in edges).values()]
    return max(counts, default=0)


def colors(edges: list[tuple[int, int]], num_ranks: int) -> list[int]:
    return color_edges(frozen([s for s, _ in edges]), frozen([d for _, d in edges]), num_ranks).tolist()


def messages(edges: list[tuple[int, int]]) -> Messages:
    n = len(edges)
    return Messages(
        frozen([s for s, _ in edges]), frozen([d for _, d in edges]), frozen(range(n + 1)), frozen(range(n))
    )


def test_a_maximum_matching_first_would_need_a_third_round() -> None:
    assert degree(TRAP) == 2
    assert degree([e for e in TRAP if e not in [(1, 3), (2, 4)]]) == 2  # two rounds still to go after that matching
    assert set(colors(TRAP, 5)) == {0, 1}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=60))
def test_colors_are_as_many_as_the_degree_and_never_meet(edges: list[tuple[int, int]]) -> None:
    color = colors(edges, 7)
    assert max_degree(frozen([s for s, _ in edges]), frozen([d for _, d in edges])) == degree(edges)
    assert set(color) <= set(range(degree(edges)))
    assert len({(c, s) for c, (s, _) in zip(color, edges)}) == len(edges)
    assert len({(c, d) for c, (_, d) in zip(color, edges)}) == len(edges)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_everyone_to_everyone_takes_one_round_per_peer(num_ranks: int) -> None:
    edges = [(s, d) for s in range(num_ranks) for d in range(num_ranks) if s != d]
    color = colors(edges, num_ranks)
    assert sorted(Counter(color).items()) == [(c, num_ranks) for c in range(num_ranks - 1)]


def test_tiers_share_rounds() -> None:
    # Nodes of two: rank 0 sends twice inside its node and twice outside; each tier needs two rounds, side by side.
    edges = [(0, 1), (0, 1), (0, 2), (0, 3)]
    assert rounds_lower_bound(messages(edges), ranks_per_node=2) == 2
    assert rounds_lower_bound(messages(edges), ranks_per_node=1) == 4
    schedule = schedule_rounds(messages(edges), 4, ranks_per_node=2)
    assert schedule.num_rounds == 2
    assert Counter(schedule.message_round.tolist()) == {0: 2, 1: 2}


def test_schedule_keeps_messages_whole_and_sorts_them() -> None:
    m = Messages(frozen([2, 0, 1]), frozen([0, 1, 2]), frozen([0, 2, 3, 5]), frozen([8, 9, 0, 4, 5]))
    ordered = schedule_rounds(m, 3).messages
    assert ordered.src.tolist() == [0, 1, 2]
    assert ordered.dst.tolist() == [1, 2, 0]
    assert ordered.ptr.tolist() == [0, 1, 3, 5]
    assert ordered.block.tolist() == [0, 4, 5, 8, 9]


@pytest.mark.parametrize(
    ("num_rounds", "rounds_per_stage", "ends"),
    [
        (0, None, []),
        (0, 4, []),
        (1, None, [0]),
        (2, None, [0, 1]),
        (4, None, [0, 1, 3]),
        (48, None, [15, 31, 47]),
        (49, None, [11, 23, 35, 48]),
        (5, 2, [1, 3, 4]),
        (5, 9, [4]),
        (3, 1, [0, 1, 2]),
    ],
)
def test_stages_cover_the_rounds(num_rounds: int, rounds_per_stage: int | None, ends: list[int]) -> None:
    assert cut_stages(num_rounds, rounds_per_stage) == ends


@given(st.integers(1, 2000))
def test_stages_hold_at_most_sixteen_rounds_and_leave_something_to_overlap(num_rounds: int) -> None:
    ends = cut_stages(num_rounds, None)
    sizes = np.diff([-1, *ends])
    assert ends[-1] == num_rounds - 1
    assert len(ends) >= min(3, num_rounds)
    assert sizes.max() <= 16
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("limit", [1, 2, 3, 16])
def test_messages_carry_each_needed_block_once(limit: int) -> None:
    plan = make_plan([90, 6], cp_size=4, tokens_per_rank=24, config=FcpConfig(block_size=2, blocks_per_message=limit))
    rank, block = needed_blocks(plan.table, plan.placement)
    m = coalesce(rank, block, plan.placement, limit)
    counts = np.diff(m.ptr)
    assert counts.max() == limit if limit <= 3 else counts.max() <= limit
    carried = sorted(zip(np.repeat(m.dst, counts).tolist(), m.block.tolist()))
    assert carried == sorted(zip(rank.tolist(), block.tolist()))
    assert (plan.placement.block_rank[m.block] == np.repeat(m.src, counts)).all()
    pairs = Counter(zip(m.src.tolist(), m.dst.tolist()))
    blocks = Counter(zip(np.repeat(m.src, counts).tolist(), np.repeat(m.dst, counts).tolist()))
    assert pairs == {pair: -(-n // limit) for pair, n in blocks.items()}  # no message more than needed
