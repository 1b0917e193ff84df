"""Who owns which block: equal tokens always, equal work as far as blocks allow."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_fcp.plan import BlockTable, build_block_table, place_blocks
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.testing.strategies import cases
from megatron_fcp.testing.streams import Case

pytestmark = pytest.mark.plan


def table_of(costs: list[int]) -> BlockTable:
    table = build_block_table([], num_tokens=len(costs), block_size=1)
    return dataclasses.replace(table, block_cost=frozen(costs))


def longest_first(costs: list[int], cp_size: int) -> int:
    """Largest load of the greedy rule without swaps."""
    load, used = [0] * cp_size, [0] * cp_size
    for cost in sorted(costs, reverse=True):
        rank = min((r for r in range(cp_size) if used[r] < len(costs) // cp_size), key=lambda r: (load[r], r))
        load[rank] += cost
        used[rank] += 1
    return max(load)


def test_swaps_find_what_greedy_misses() -> None:
    costs = [10, 9, 4, 3, 3, 1]
    best = min(max(sum(half), sum(costs) - sum(half)) for half in combinations(costs, 3))
    assert longest_first(costs, 2) == 16
    assert best == 15
    assert place_blocks(table_of(costs), 2).rank_cost(table_of(costs)).max() == best


def test_swaps_never_make_it_worse() -> None:
    rng = np.random.default_rng(0)
    better = 0
    for _ in range(300):
        cp_size, slots = int(rng.integers(1, 7)), int(rng.integers(1, 6))
        costs = rng.integers(0, 50, size=cp_size * slots).tolist()
        table = table_of(costs)
        largest, greedy = int(place_blocks(table, cp_size).rank_cost(table).max()), longest_first(costs, cp_size)
        assert largest <= greedy, costs
        better += largest < greedy
    assert better > 50


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_every_rank_owns_the_same_number_of_tokens(case: Case) -> None:
    plan = case.plan()
    seen = np.zeros(plan.table.num_tokens, dtype=int)
    for rank in range(case.cp_size):
        rank_plan = plan.rank_plan(rank)
        assert rank_plan.num_tokens == case.tokens_per_rank
        assert (np.diff(rank_plan.local_token_global_indices) > 0).all()
        seen[rank_plan.local_token_global_indices] += 1
    assert (seen == 1).all()
    assert plan.placement.rank_cost(plan.table).sum() == plan.table.block_cost.sum()


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_one_giant_document_is_balanced_although_its_blocks_are_not(cp_size: int) -> None:
    table = build_block_table([cp_size * 256], num_tokens=cp_size * 256, block_size=16)
    cost = place_blocks(table, cp_size).rank_cost(table)
    assert table.block_cost.max() > 1.9 * table.block_cost.mean()
    assert cost.max() <= 1.001 * cost.mean()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_positions_count_from_the_start_of_the_document(case: Case) -> None:
    plan = case.plan()
    stream_position = np.zeros(plan.table.num_tokens, dtype=int)
    stream_document = np.full(plan.table.num_tokens, -1)
    at, number = 0, 0
    for d, length in enumerate(case.lengths):
        at = case.starts[d] if case.starts is not None else at
        stream_position[at : at + length] = np.arange(length)
        stream_document[at : at + length] = number
        at += length
        number += length > 0
    for rank in range(case.cp_size):
        rank_plan = plan.rank_plan(rank)
        index = rank_plan.local_token_global_indices
        assert rank_plan.position_ids.tolist() == stream_position[index].tolist()
        assert rank_plan.document_ids.tolist() == stream_document[index].tolist()
        assert rank_plan.max_position == stream_position[index].max()
