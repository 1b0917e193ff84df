"""Plans in waves over real processes: right, the same bits every time, and within the limit of held KV."""

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.runtime import Communicator
from megatron_fcp.runtime.attention import BackwardPass, ForwardPass
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.testing.attention_check import (
    Model,
    RankResult,
    gather,
    largest_errors,
    random_inputs,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.gloo_pool import GlooPool

pytestmark = pytest.mark.runtime

COST = CostModel(5e-11, 100, 100, 4096, 45e9, 300e9, 1e-5, 2)
TOLERANCE = 1e-12
CP_SIZE = 6
LIMIT = 64
MODEL = Model()


def plan_in_waves() -> Plan:
    """Six ranks, two to a node, of which some receive more than four times the limit."""
    config = FcpConfig(block_size=2, kv_buffer_tokens=LIMIT)
    return make_plan([500, 7, 40, 29], cp_size=CP_SIZE, tokens_per_rank=96, config=config, hardware=COST)


def test_the_plan_has_waves_in_which_blocks_are_passed_on() -> None:
    plan = plan_in_waves()
    m = plan.schedule.messages
    assert plan.schedule.waves is not None
    assert plan.schedule.waves.ends.size > 4
    assert (plan.placement.block_rank[m.block] != np.repeat(m.src, np.diff(m.ptr))).any()


def twice(comm: Communicator) -> tuple[list[RankResult], list[tuple[int, int]]]:
    """Two runs, and the most KV tokens held at once in a forward and a backward pass, with what the plan promises."""
    plan = plan_in_waves()
    comm.warm_up()
    comm.agree(plan.digest)
    x = random_inputs(plan, MODEL, 0)
    results = [run_rank(comm, plan, MODEL, x) for _ in range(2)]
    compiled = CompiledPlan(plan.rank_plan(comm.rank))
    tokens = torch.from_numpy(compiled.rank_plan.local_token_global_indices.copy())
    q, k, v, dout = (t[tokens].nan_to_num() for t in (x.q, x.k, x.v, x.dout))
    kernel = MODEL.select()
    forward = ForwardPass(q, k, v, compiled, comm, kernel, 1.0)
    out, lse = forward.run()
    backward = BackwardPass(dout, q, k, v, out, lse, compiled, comm, kernel, 1.0)
    backward.run()
    return results, [
        (forward.kv.peak_tokens, compiled.rank_plan.peak_forward.kv_tokens),
        (backward.kv.peak_tokens, compiled.rank_plan.peak_backward.kv_tokens),
        (backward.dkv.peak_tokens, compiled.rank_plan.peak_backward.dkv_tokens),
    ]


def test_waves_over_gloo(gloo: GlooPool) -> None:
    plan = plan_in_waves()
    ranks = gloo.run(CP_SIZE, twice)
    want = right_answer(plan, MODEL, random_inputs(plan, MODEL, 0))
    first, second = ([results[i] for results, _ in ranks] for i in range(2))
    for name, error in largest_errors(plan, gather(first, want), want).items():
        assert error < TOLERANCE, (name, error)
    again, once = gather(second, want), gather(first, want)
    assert all(torch.equal(getattr(again, n), getattr(once, n)) for n in ("out", "dq", "dk", "dv"))
    most = [max(used for _, peaks in ranks for used, _ in peaks[i : i + 1]) for i in range(2)]
    assert all(LIMIT // 2 < held <= LIMIT for held in most)
    assert all(used == promised for _, peaks in ranks for used, promised in peaks)
