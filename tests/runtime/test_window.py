"""Windows and sinks: out and all gradients equal dense fp64 attention, with ranks as threads and as processes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.runtime import Communicator, CompiledPlan, fcp_attention
from megatron_fcp.runtime.kernels import Rows
from megatron_fcp.runtime.merge import Accumulator, sink_gradient
from megatron_fcp.testing.attention_check import (
    TOLERANCE,
    Model,
    RankResult,
    check_in_threads,
    gather,
    largest_errors,
    random_inputs,
    random_model,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.streams import Case, edge_windows, random_case
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

CASES, CHUNKS = 120, 3
OVER_GLOO = 8
SINKS = (5.0, None, 0.0, -3.0)


def windowed_case(rng: np.random.Generator, cp_size: int | None = None) -> Case:
    """A causal case with a window of any length, or without one, made for it alone or beside full layers."""
    case = random_case(rng, max_cp_size=8)
    while cp_size is not None and case.cp_size != cp_size:
        case = random_case(rng, max_cp_size=8)
    assert case.config.block_size is not None
    longest = max(case.lengths, default=0)
    windows = [None, *edge_windows(case.config.block_size, longest), int(rng.integers(0, longest + 2))]
    return dataclasses.replace(
        case,
        config=dataclasses.replace(case.config, mask="causal"),
        window=windows[rng.integers(len(windows))],
        layers="mixed" if rng.random() < 0.5 else "alike",
    )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_streams(chunk: int) -> None:
    for seed in range(CASES * chunk // CHUNKS, CASES * (chunk + 1) // CHUNKS):
        rng = np.random.default_rng([31, seed])
        case = windowed_case(rng)
        plan = case.plan()
        plan = reroute(plan, rng) if seed % 4 == 0 else plan
        model = dataclasses.replace(random_model(rng), sink=SINKS[seed % len(SINKS)])
        try:
            check_in_threads(plan, model, seed=seed, mode="rendezvous" if seed % 2 else "eager")
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}, {model}")
            raise


def plan_and_model(cp_size: int, seed: int) -> tuple[Case, Plan, Model]:
    rng = np.random.default_rng([32, cp_size, seed])
    case = windowed_case(rng, cp_size)
    model = dataclasses.replace(random_model(rng), sink=SINKS[seed % len(SINKS)])
    return case, case.plan(), model


def run_cases(comm: Communicator) -> list[RankResult]:
    comm.warm_up()
    results = []
    for seed in range(OVER_GLOO):
        _, plan, model = plan_and_model(comm.size, seed)
        comm.agree(plan.digest)
        results.append(run_rank(comm, plan, model, random_inputs(plan, model, seed)))
    return results


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_random_streams_over_gloo(gloo: GlooPool, cp_size: int) -> None:
    by_rank = gloo.run(cp_size, run_cases)
    for seed in range(OVER_GLOO):
        case, plan, model = plan_and_model(cp_size, seed)
        want = right_answer(plan, model, random_inputs(plan, model, seed))
        for name, error in largest_errors(plan, gather([r[seed] for r in by_rank], want), want).items():
            assert error < TOLERANCE, (name, error, seed, case, model)


def test_windows_that_are_longer_than_a_strip() -> None:
    """Long documents: causal work behind the first window, edges in many blocks, strips of the CPU kernel."""
    for window in (100, 257, 700):
        plan = make_plan(
            [1500, 30, 480], cp_size=4, tokens_per_rank=512, config=FcpConfig(block_size=64), window=window
        )
        check_in_threads(plan, Model(2, 1, 8, 8, sink=1.0), seed=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_precision_of_a_sink_does_not_depend_on_the_ranks(dtype: torch.dtype) -> None:
    """Errors at cp 4 are at most twice those of one rank with the same kernel."""
    worst: dict[int, dict[str, float]] = {}
    for cp_size in (1, 4):
        config = FcpConfig(block_size=32)
        plan = make_plan([700, 300], cp_size=cp_size, tokens_per_rank=1024 // cp_size, config=config, window=90)
        model = Model(4, 2, 32, 32, dtype=dtype, sink=2.0)
        x = random_inputs(plan, model, 1)
        want = right_answer(plan, model, x)
        results = run_ranks(cp_size, lambda comm, p=plan, m=model, x=x: run_rank(comm, p, m, x))
        worst[cp_size] = largest_errors(plan, gather(results, want), want)
    assert worst[1].keys() == {"out", "dq", "dk", "dv", "dsink"}
    for name, error in worst[4].items():
        assert error <= 2 * worst[1][name] + 1e-6, (name, worst)


def test_gradients_of_sinks_have_the_same_bits_every_time() -> None:
    plan = make_plan([200, 56], cp_size=2, tokens_per_rank=128, config=FcpConfig(block_size=16), window=40)
    model = Model(4, 2, 16, 16, dtype=torch.float32, sink=5.0)
    x = random_inputs(plan, model, 0)
    runs = [run_ranks(2, lambda comm: run_rank(comm, plan, model, x)) for _ in range(2)]
    for first, second in zip(*runs):
        for name in ("out", "dq", "dk", "dv", "dsink"):
            a, b = getattr(first, name), getattr(second, name)
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), name


def test_a_sink_of_minus_infinity_is_none() -> None:
    generator = torch.Generator().manual_seed(0)
    plan = CompiledPlan(make_plan([5, 2], cp_size=1, tokens_per_rank=8, config=FcpConfig(block_size=4)).rank_plan(0))
    q, k, v = (torch.randn(8, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    kernel = Model(2, 2, 4, 4).select()
    sink = torch.full((2,), -torch.inf, dtype=torch.float64, requires_grad=True)
    out = fcp_attention(q, k, v, plan=plan, comm=None, kernel=kernel, sink=sink)
    torch.testing.assert_close(out, fcp_attention(q, k, v, plan=plan, comm=None, kernel=kernel), rtol=0, atol=1e-15)
    out.sum().backward()
    assert sink.grad is not None
    assert sink.grad.tolist() == [0, 0]


def test_large_and_small_sinks_neither_overflow_nor_touch_empty_rows() -> None:
    for logit in (-1e4, -90.0, 90.0, 1e4):
        total = Accumulator(3, 1, 2, like=torch.empty(0))
        rows = Rows.of(np.array([0, 1]), torch.device("cpu"))
        total.add(rows, torch.ones(2, 1, 2), torch.tensor([[80.0], [-80.0]]), first=True)
        out, lse = total.finish(torch.tensor([logit]))
        assert out.isfinite().all()
        assert lse[:2, 0].tolist() == pytest.approx([max(80.0, logit), max(-80.0, logit)], abs=1e-3)
        assert (out[2] == 0).all()
        assert lse[2] == -torch.inf
        dout = torch.full((3, 1, 2), torch.nan)
        dout[:2] = 1.0
        taken = torch.sigmoid(torch.tensor([logit - 80.0, logit + 80.0], dtype=torch.float64))
        want = -(taken * 2 * (1 - taken)).sum()
        got = sink_gradient(torch.tensor([logit]), dout, out, lse)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(want.item(), rel=1e-4, abs=1e-30)


def test_one_logit_per_head() -> None:
    plan = CompiledPlan(make_plan([8], cp_size=1, tokens_per_rank=8, config=FcpConfig(block_size=4)).rank_plan(0))
    q = torch.randn(8, 2, 4)
    with pytest.raises(ValueError, match=r"one logit for each of 2 heads; got shape \(3,\)"):
        fcp_attention(q, q, q, plan=plan, comm=None, kernel=Model(2, 2, 4, 4).select(), sink=torch.zeros(3))
