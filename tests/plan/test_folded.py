"""Placements of a ring where a batch fits one, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.blocks import build_block_table
from megatron_fcp.plan.folded import EVEN, fold
from megatron_fcp.plan.shape import block_shapes
from megatron_fcp.simulate import load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.peers import RINGS, run_system
from megatron_fcp.testing.audit import audit
from megatron_fcp.testing.oracle import TOLERANCE, largest_error
from megatron_fcp.testing.streams import Case as Stream

pytestmark = pytest.mark.plan

TOKENS, BLOCK = 64, 16


def folded(lengths: list[int], cp_size: int, block_size: int = BLOCK) -> tuple[np.ndarray, np.ndarray] | None:
    table = build_block_table(lengths, num_tokens=cp_size * TOKENS, block_size=block_size)
    half = 0.01  # rims count for little, as with documents of real length
    return fold(table, block_shapes(table, half, half), cp_size, half, half)


def test_halves_of_ranks_meet_their_mirror_image() -> None:
    found = folded([4 * TOKENS], 4)
    assert found is not None
    owner, price = found
    assert owner.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]
    assert price.max() <= EVEN * price.mean()


def test_every_document_has_its_own_ranks() -> None:
    found = folded([2 * TOKENS, 2 * TOKENS], 4)
    assert found is not None
    assert found[0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 3, 3, 3, 3, 2, 2]
    short = folded([TOKENS // 2] * 8, 4)
    assert short is not None
    assert short[0].tolist() == np.repeat(np.arange(4), 4).tolist()


@pytest.mark.parametrize(
    ("why", "lengths", "block_size"),
    [
        ("uneven", [3 * TOKENS, TOKENS], BLOCK),
        ("half empty", [2 * TOKENS], BLOCK),
        ("a document in part of a rank and in another", [TOKENS + 8, TOKENS - 8, 2 * TOKENS], BLOCK),
        ("a block that is no half", [4 * TOKENS], TOKENS),
    ],
)
def test_other_batches_are_left_to_the_search(why: str, lengths: list[int], block_size: int) -> None:
    assert folded(lengths, 4, block_size) is None, why


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("ranks_of_each", [1, 4, 16])
def test_plans_are_valid_and_execute(hardware: str, ranks_of_each: int) -> None:
    cost = Case(np.array([1]), 16, TOKENS, load_hardware(hardware)).forward
    stream = Stream((ranks_of_each * TOKENS,) * (16 // ranks_of_each), None, 16, TOKENS, FcpConfig(block_size=BLOCK))
    plan = make_plan(
        stream.lengths, cp_size=stream.cp_size, tokens_per_rank=TOKENS, config=stream.config, hardware=cost
    )
    audit(stream, plan)
    assert largest_error(plan, np.random.default_rng(0)) < TOLERANCE


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize(("ranks_of_each", "tokens"), [(16, 32768), (32, 16384)])  # the latter not within EVEN
def test_equal_documents_of_many_ranks_are_level_with_rings(hardware: str, ranks_of_each: int, tokens: int) -> None:
    case = Case(np.full(64 // ranks_of_each, ranks_of_each * tokens), 64, tokens, load_hardware(hardware))
    ours, *rings = (case.efficiency(run_system(name, case)) for name in ("fcp", *RINGS))
    assert ours >= 0.98 * max(rings), rings
