"""Layout traffic, whole steps and memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_fcp.plan import Plan
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.memory import busiest_rank, held_bound, held_tokens
from megatron_fcp.simulate.models import MODELS, Parallel, find_model
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.reshuffle import home_ranks, with_reshuffle
from megatron_fcp.simulate.step import price_step

pytestmark = pytest.mark.plan

N, TOKENS = 16, 8192
MODEL = find_model("llama3-8b")
PARALLEL = Parallel(tensor=4, micro_batches=4)


@pytest.fixture(scope="module")
def planned() -> tuple[Case, Plan]:
    lengths = draw_lengths("longtail", num_tokens=N * TOKENS, seed=5)
    case = Case(lengths, N, TOKENS, load_hardware("flat5920"), PARALLEL.attention(MODEL))
    return case, fcp_plan(case)


def test_home_is_megatrons_zigzag_of_the_stream(planned: tuple[Case, Plan]) -> None:
    _, plan = planned
    block, home, tokens = home_ranks(plan)
    token_home = np.repeat(home, tokens)
    chunk = np.arange(N * TOKENS) // (TOKENS // 2)
    np.testing.assert_array_equal(token_home, np.minimum(chunk, 2 * N - 1 - chunk))
    np.testing.assert_array_equal(np.repeat(block, tokens), np.arange(N * TOKENS) // plan.table.block_size)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_the_layout_moves_what_it_must(planned: tuple[Case, Plan], overlap: bool, backward: bool) -> None:
    case, plan = planned
    bare = plan_program(plan, case, backward=backward)
    around = with_reshuffle(bare, plan, case, groups=4 if overlap else 1, backward=backward).run()
    block, home, tokens = home_ranks(plan)
    away = tokens[home != plan.placement.block_rank[block]].sum()
    q, kv = case.shape.num_heads * case.shape.head_dim * 2, case.shape.kv_bytes_per_token
    per_token = q + q + kv  # forward: K, V, Q in, out home; backward: dout in, dQ, dK, dV home
    moved = around.bytes_moved(1, sends=True).sum() - bare.run().bytes_moved(1, sends=True).sum()
    assert moved == away * per_token
    assert around.compute.sum() == pytest.approx(bare.run().compute.sum())
    assert around.makespan > bare.run().makespan


@pytest.mark.parametrize("backward", [False, True])
def test_overlap_gains_where_kernels_take_longer_than_the_layout(backward: bool) -> None:
    case = Case(draw_lengths("bimodal", num_tokens=32 * 32768, seed=0), 32, 32768, load_hardware("flat5920"))
    plan = fcp_plan(case)
    bare = plan_program(plan, case, backward=backward)
    exposed, overlapped = (
        with_reshuffle(bare, plan, case, groups=groups, backward=backward).run().makespan for groups in (1, 4)
    )
    assert bare.run().makespan < overlapped < exposed


def test_a_step_adds_up(planned: tuple[Case, Plan]) -> None:
    case, plan = planned
    step = price_step(plan, case, MODEL, PARALLEL)
    assert step.layer == pytest.approx(step.forward + step.backward + step.linear)
    flops = 6 * (MODEL.attention_parameters + MODEL.mlp_parameters) * TOKENS
    assert step.linear == pytest.approx(flops / (case.hardware.kernel_flops * 4))
    pipelined = price_step(plan, case, MODEL, dataclasses.replace(PARALLEL, pipeline=4))
    assert pipelined.bubble == pytest.approx(3 / 7)
    recomputed = price_step(plan, case, MODEL, dataclasses.replace(PARALLEL, recompute=True))
    assert recomputed.layer == pytest.approx(step.layer + step.forward + step.linear / 3)
    assert recomputed.memory.activations < step.memory.activations
    reshuffled = price_step(plan, case, MODEL, PARALLEL, layout="reshuffle")
    assert reshuffled.layer == pytest.approx(step.layer + reshuffled.reshuffle)


@pytest.mark.parametrize(("name", "billions"), [("llama3-8b", 8.0), ("llama3-70b", 70.6), ("llama3-405b", 405)])
def test_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    m = MODELS[name]
    parameters = m.num_layers * (m.attention_parameters + m.experts * m.mlp_parameters) + 2 * m.vocab * m.hidden
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_busiest_rank_is_found_without_looking_at_all(planned: tuple[Case, Plan]) -> None:
    _, plan = planned
    exact = [held_tokens(plan, rank) for rank in range(N)]
    assert (held_bound(plan) >= exact).all()
    rank, most = busiest_rank(plan)
    assert most == max(exact) == exact[rank] > 0


def test_too_little_memory_names_the_rank_and_the_gap(planned: tuple[Case, Plan]) -> None:
    case, plan = planned
    memory = price_step(plan, case, MODEL, PARALLEL).memory
    have = memory.total - 1.5e9
    small = case.replace(hardware=dataclasses.replace(case.hardware, memory_bytes=have))
    with pytest.raises(ValueError, match=rf"rank {memory.rank} needs .* 1\.5 GB more than the .* of flat5920"):
        memory.check(small)
    memory.check(case.replace(hardware=dataclasses.replace(case.hardware, memory_bytes=have + 2e9)))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(tensor=3), "--tensor 3 does not divide the 32 heads"),
        (Parallel(pipeline=5), "--pipeline 5 does not divide the 32 layers"),
    ],
)
def test_splits_that_cannot_be(parallel: Parallel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallel.attention(MODEL)
    with pytest.raises(ValueError, match="--micro-batches must be"):
        Parallel(micro_batches=0)
    with pytest.raises(ValueError, match=r"--model 'gpt-9' is unknown"):
        find_model("gpt-9")
