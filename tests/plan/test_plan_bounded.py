"""The limit of held KV: kept by every rank in both passes, and refused with a remedy where it cannot be."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.bounded import DEFAULT_MULTIPLE, received_tokens
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.planfile import read_plan, write_plan
from megatron_fcp.plan.program import Compute, Exchange
from megatron_fcp.plan.schedule import Waves
from megatron_fcp.testing.audit import audit
from megatron_fcp.testing.oracle import TOLERANCE, largest_error
from megatron_fcp.testing.streams import Case, random_case, random_lengths

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


def received(plan: Plan) -> IntArray:
    return received_tokens(plan.table, plan.schedule, plan.cp_size)


def forwards(plan: Plan) -> bool:
    m = plan.schedule.messages
    return bool((plan.placement.block_rank[m.block] != np.repeat(m.src, np.diff(m.ptr))).any())


def test_a_limit_brings_waves_and_the_default_none() -> None:
    free, tight = long_document(None), long_document(2048)
    assert free.digest == long_document(DEFAULT_MULTIPLE * 1024).digest
    assert free.digest == long_document(int(received(free).max())).digest
    assert free.schedule.waves is None
    assert received(free).max() > 2048
    check_held(tight, 2048)
    assert tight.schedule.waves is not None
    assert forwards(free)
    assert forwards(tight)


def test_waves_deliver_pass_blocks_on_and_keep_the_limit(tmp_path: Path) -> None:
    forwarding = most_waves = 0
    for seed in range(40):
        rng = np.random.default_rng([61, seed])
        cp_size, blocks = int(rng.integers(3, 14)), int(rng.integers(4, 12))
        block_size = int(rng.integers(1, 5))
        config = FcpConfig(block_size=block_size)
        tokens = blocks * block_size
        lengths = random_lengths(rng, ("giant", "few", "random")[seed % 3], cp_size * tokens, block_size)
        cost = replace(COST, ranks_per_node=int(rng.choice([1, 2, 4])))
        free = make_plan(lengths, cp_size=cp_size, tokens_per_rank=tokens, config=config, hardware=cost)
        least, most = LEAST * block_size, int(received(free).max(initial=0))
        if most <= least:
            continue
        config = replace(config, kv_buffer_tokens=int(rng.integers(least, most)))
        plan = make_plan(lengths, cp_size=cp_size, tokens_per_rank=tokens, config=config, hardware=cost)
        assert plan.schedule.waves is not None
        audit(Case(tuple(lengths), None, cp_size, tokens, config), plan)
        check_held(plan, plan.schedule.waves.held_tokens)
        assert plan.schedule.waves.held_tokens == config.kv_buffer_tokens
        assert largest_error(plan, rng) < TOLERANCE
        write_plan(plan, tmp_path / "plan.json")
        back = read_plan(tmp_path / "plan.json")
        assert back.digest == plan.digest != replace_waves(plan, None).digest
        assert all(back.rank_plan(r).backward == plan.rank_plan(r).backward for r in range(cp_size))
        forwarding += forwards(plan)
        most_waves = max(most_waves, plan.schedule.waves.ends.size)
    assert forwarding > 15
    assert most_waves > 10


def replace_waves(plan: Plan, waves: Waves | None) -> Plan:
    return Plan(plan.table, plan.placement, replace(plan.schedule, waves=waves), plan.ranks_per_node, plan.push_prices)


def test_waves_that_contradict_the_rounds_are_refused() -> None:
    plan = long_document(2048)
    waves = plan.schedule.waves
    assert waves is not None
    for other, message in (
        (Waves(waves.ends[-1:], 2048), "at least 2 waves"),
        (Waves(waves.ends[:-1], 2048), f"ascending rounds up to {plan.schedule.num_rounds - 1}"),
        (Waves(waves.ends, 2047), r"receives \d+ tokens in a wave, more than half of the 2047"),
        (Waves(frozen([waves.ends[0] - 1, *waves.ends[1:]]), 2048), "in more than one wave|on in wave 1, in which"),
    ):
        with pytest.raises(ValueError, match=message):
            replace_waves(plan, other)


def test_without_waves_all_that_is_passed_on_is_pulled_before_kernels_are_waited_for() -> None:
    plan = long_document(None)
    assert forwards(plan)
    assert max(ends.size for ends in plan.schedule.stage_ends) > 2
    for rank, tokens in enumerate(received(plan).tolist()):
        program = plan.rank_plan(rank)
        for steps, peak in ((program.forward, program.peak_forward), (program.backward, program.peak_backward)):
            pulls = [i for i, s in enumerate(steps) if isinstance(s, Exchange) and s.kind == "pull"]
            computes = [i for i, s in enumerate(steps) if isinstance(s, Compute)]
            assert max(pulls, default=-1) < min(computes)
            assert peak.kv_tokens == tokens


def test_only_ranks_that_cannot_keep_all_they_receive_wait_and_they_use_the_room() -> None:
    plan = long_document(8192)
    tokens = received(plan)
    assert 0 < (tokens > 8192).sum() < plan.cp_size
    for rank in range(plan.cp_size):
        forward = plan.rank_plan(rank).forward
        last_pull = max((i for i, s in enumerate(forward) if isinstance(s, Exchange)), default=-1)
        waits = any(isinstance(s, Compute) for s in forward[:last_pull])
        assert waits == (tokens[rank] > 8192)
        held = plan.rank_plan(rank).peak_forward.kv_tokens
        assert held == tokens[rank] if not waits else held > 8192 // 2


def test_a_limit_that_cannot_be_kept_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"--fcp-kv-buffer-tokens 255 .* at least 256 or lower --fcp-block-size"):
        long_document(255)
    check_held(long_document(256), 256)
    with pytest.raises(ValueError, match=r"--fcp-kv-buffer-tokens must be an integer of at least 1, got 0"):
        FcpConfig(kv_buffer_tokens=0)
