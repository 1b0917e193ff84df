"""The limit of held KV: kept by every rank in both passes, and refused with a remedy where it cannot be."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.bounded import DEFAULT_MULTIPLE
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.testing.audit import audit
from megatron_fcp.testing.oracle import TOLERANCE, largest_error
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.plan

COST = CostModel(5e-11, 100, 100, 4096, 45e9, 300e9, 1e-5, 4)
LEAST = 4  # blocks: two stages of one round, a block of which comes from inside and one from outside the node
PENDING = 4  # messages of dKV that lie beside what they are added to: two rounds, two tiers


def check_held(plan: Plan, limit: int) -> None:
    tokens = plan.table.shared_stop - plan.table.shared_start
    pushes = plan.push.messages
    largest = max((int(tokens[b].sum()) for b in np.split(pushes.block, pushes.ptr[1:-1])), default=0)
    for rank in range(plan.cp_size):
        program = plan.rank_plan(rank)
        assert program.peak_forward.kv_tokens <= limit
        assert program.peak_backward.kv_tokens <= limit
        assert program.peak_backward.dkv_tokens <= limit + PENDING * largest


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32), st.integers(LEAST, 20), st.booleans())
def test_no_rank_holds_more_than_it_may(seed: int, blocks: int, with_hardware: bool) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, max_cp_size=13, max_blocks_per_rank=9)
    limit = blocks * case.config.block_size + int(rng.integers(case.config.block_size))
    config = replace(case.config, mask="causal", rounds_per_stage=None, kv_buffer_tokens=limit)
    case = replace(case, config=config)
    cost = replace(COST, ranks_per_node=config.ranks_per_node) if with_hardware else None
    plan = make_plan(
        case.lengths, starts=case.starts, cp_size=case.cp_size, tokens_per_rank=case.tokens_per_rank, config=config,
        hardware=cost,
    )  # fmt: skip
    audit(case, plan)
    check_held(plan, limit)
    assert largest_error(plan, rng) < TOLERANCE


def long_document(limit: int | None) -> Plan:
    config = FcpConfig(block_size=64, kv_buffer_tokens=limit)
    return make_plan([12000, *[256] * 17], cp_size=16, tokens_per_rank=1024, config=config, hardware=COST)


def forwards(plan: Plan) -> bool:
    m = plan.schedule.messages
    return bool((plan.placement.block_rank[m.block] != np.repeat(m.src, np.diff(m.ptr))).any())


def test_a_limit_costs_forwarding_and_the_default_costs_nothing() -> None:
    free, tight = long_document(None), long_document(2048)
    assert free.digest == long_document(DEFAULT_MULTIPLE * 1024).digest
    assert max(free.rank_plan(r).peak_forward.kv_tokens for r in range(16)) > 2048
    check_held(tight, 2048)
    assert forwards(free)
    assert not forwards(tight)  # what is passed on has to be kept


def test_a_limit_that_cannot_be_kept_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"--fcp-kv-buffer-tokens 255 .* at least 256 or lower --fcp-block-size"):
        long_document(255)
    check_held(long_document(256), 256)
    with pytest.raises(ValueError, match=r"--fcp-kv-buffer-tokens must be an integer of at least 1, got 0"):
        FcpConfig(kv_buffer_tokens=0)
