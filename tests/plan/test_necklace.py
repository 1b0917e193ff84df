"""Streams of short documents divided in few cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from megatron_fcp.plan import make_plan
from megatron_fcp.plan.blocks import build_block_table
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.makespan import FEW_RANKS, block_sizes_to_try, choose_block_size
from megatron_fcp.plan.necklace import share_necklace
from megatron_fcp.plan.shape import block_shapes, blocks_price
from megatron_fcp.testing.oracle import TOLERANCE, largest_error

pytestmark = pytest.mark.plan

HALF, BLOCK = 100.0, 256
COST = CostModel(5e-11, HALF, HALF, 4096, 45e9, 300e9, 1e-5, 8)


def short_documents(ranks: int, tokens: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(7.4, 0.5, ranks * tokens // 500), 16, 8192).astype(np.int64)
    return lengths[np.cumsum(lengths) <= ranks * tokens].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_tokens_are_equal_and_prices_nearly_so_in_few_cuts(ranks: int) -> None:
    tokens = 32768
    table = build_block_table(short_documents(ranks, tokens), num_tokens=ranks * tokens, block_size=BLOCK)
    shapes = block_shapes(table, HALF, HALF)
    owner, price = share_necklace(table, shapes, np.ones(ranks), HALF, HALF)
    slots = table.num_blocks // ranks
    held = [np.flatnonzero(owner == r) for r in range(ranks)]
    assert [blocks.size for blocks in held] == [slots] * ranks
    again = [float(blocks_price(blocks, slots, shapes, HALF, HALF)) for blocks in held]
    assert price.tolist() == pytest.approx(again)
    assert price.max() <= 1.005 * price.mean()
    n = table.document_length.astype(float)
    whole = float((n * (n + 1) / 2 * (1 + HALF / n) ** 2).sum())
    assert price.sum() <= 1.015 * whole  # a cut costs about 100 pairs for every token of its document
    assert (np.diff(owner) != 0).sum() <= 4 * (ranks - 1)


@pytest.mark.parametrize("seed", range(20))
def test_two_ranks_get_the_best_windows_where_cuts_are_free(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, size = int(rng.choice([8, 12, 16])), 64
    lengths = rng.integers(1, size + 1, count)  # each starts its own block
    table = build_block_table(lengths, num_tokens=count * size, block_size=size, starts=np.arange(count) * size)
    shapes = block_shapes(table, HALF, HALF)
    owner, price = share_necklace(table, shapes, np.ones(2), HALF, HALF)
    assert np.bincount(owner).tolist() == [count // 2] * 2
    best = min(
        max(shapes.inner[list(chosen)].sum(), shapes.inner.sum() - shapes.inner[list(chosen)].sum())
        for chosen in itertools.combinations(range(count), count // 2)
        if sum((b + 1) % count not in chosen for b in chosen) <= 2  # windows on the circle
    )
    assert price.max() == pytest.approx(best)


def test_a_slow_rank_gets_less_compute_and_as_many_tokens() -> None:
    ranks, tokens = 8, 32768
    speed = np.array([1.0, 1.0, 0.8, 1.0, 1.0, 1.0, 0.9, 1.0])
    table = build_block_table(short_documents(ranks, tokens), num_tokens=ranks * tokens, block_size=BLOCK)
    owner, price = share_necklace(table, block_shapes(table, HALF, HALF), speed, HALF, HALF)
    assert np.ptp(np.bincount(owner)) == 0
    load = price / speed
    assert load.max() <= 1.01 * load.mean()


def test_plans_of_short_documents_execute_and_repeat() -> None:
    lengths = [int(n) // 64 + 1 for n in short_documents(6, 16384)]
    lengths = [n for n, total in zip(lengths, np.cumsum(lengths)) if total <= 6 * 256]
    one, two = (make_plan(lengths, cp_size=6, tokens_per_rank=256, hardware=COST) for _ in range(2))
    assert one.digest == two.digest
    assert largest_error(one, np.random.default_rng(0)) < TOLERANCE


@pytest.mark.parametrize(
    ("ranks", "longest", "finer"),
    [(16, 8192, True), (16, 8193, False), (FEW_RANKS // 2, 64, True), (FEW_RANKS // 2 + 1, 64, False)],
)
def test_finer_blocks_are_tried_for_few_ranks_that_could_each_hold_any_document(
    ranks: int, longest: int, finer: bool
) -> None:
    lengths, cost = np.array([longest, *[300] * 1000]), replace(COST, latency_s=0.0)
    least = choose_block_size(lengths, ranks, 8192, cost)
    assert least >= 256
    assert block_sizes_to_try(lengths, ranks, 8192, cost) == ([least, least // 2] if finer else [least])
