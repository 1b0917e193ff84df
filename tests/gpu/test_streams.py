"""Buffers between streams, memory, and two processes on one GPU. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_fcp.plan import Plan
from megatron_fcp.runtime.attention import BackwardPass, ForwardPass
from megatron_fcp.runtime.communicator import Communicator
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels import Kernel, select_kernel
from megatron_fcp.runtime.replay import Nowhere
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.gpu_checks import STREAM_LIMITS, Heads, attend, stream_errors, stream_inputs, stream_plan
from megatron_fcp.testing.host_staged import HostStagedTransport
from megatron_fcp.testing.stream_transport import StreamGroup

pytestmark = pytest.mark.gpu

HEADS = Heads(8, 2, 128, 128)
SLEEP_CYCLES = 3_000_000  # about 2 ms, longer than any kernel here


def kernel_for(device: torch.device) -> Kernel:
    return select_kernel(
        device=device, dtype=torch.bfloat16, head_dim_qk=128, head_dim_v=128, num_heads=8, num_kv_heads=2
    )[0]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_no_stream_is_ahead_of_its_data(cp_size: int) -> None:
    """Whichever stream of whichever rank sleeps, the bits are those of the run in which none does."""
    device, plan = torch.device("cuda"), stream_plan(cp_size)
    inputs = stream_inputs(plan, HEADS, torch.bfloat16)
    kernel = kernel_for(device)

    def run(victim: tuple[int, str] | None) -> list[list[torch.Tensor]]:
        def sleep(rank: int, stream: str) -> None:
            if (rank, stream) == victim:
                torch.cuda._sleep(SLEEP_CYCLES)

        group = StreamGroup(cp_size, device, sleep)
        return group.run(lambda comm: attend(comm, plan, inputs, kernel, device, autograd=False))

    calm = run(None)
    for name, error in stream_errors(plan, inputs, calm).items():
        assert error < STREAM_LIMITS[name], (name, error)
    for rank in range(cp_size):
        for stream in ("compute", "transfer"):
            for got, want in zip(run((rank, stream)), calm):
                assert all(torch.equal(a, b) for a, b in zip(got, want)), (rank, stream)


def bytes_of_pass(plan: Plan, rank: int) -> tuple[int, int]:
    """Bytes that forward and backward may add at their peak: the planner's figures and the runtime's accumulators."""
    rank_plan = plan.rank_plan(rank)
    tokens = rank_plan.num_tokens
    kv = HEADS.num_kv_heads * (HEADS.head_dim_qk + HEADS.head_dim_v)  # elements per token
    rows = tokens * HEADS.num_heads
    out = rows * HEADS.head_dim_v
    most = max(stage.kv_tokens for stage in rank_plan.stages)
    forward = rank_plan.peak_forward.kv_tokens * kv * 2  # pulled KV, bfloat16
    forward += 2 * most * kv * 2  # one call's packed keys
    forward += out * (4 + 4 + 2 + 2) + rows * 4 * 8  # sums in float32, a partial, roundings; weights and log-sum-exps
    backward = rank_plan.peak_backward.kv_tokens * kv * 2 + rank_plan.peak_backward.dkv_tokens * kv * 4
    backward += 4 * most * kv * 2 + 2 * most * kv * 4  # packed keys and their gradients; the kernel's own accumulators
    backward += rows * HEADS.head_dim_qk * (4 + 2 + 4 + 4) + tokens * kv * (4 + 2) + out * 4 + rows * 4 * 8
    return forward, backward


@pytest.mark.parametrize("rank", range(4))
def test_memory_stays_within_the_planners_figure(rank: int) -> None:
    device, plan = torch.device("cuda"), stream_plan(4)
    compiled = CompiledPlan(plan.rank_plan(rank), device)
    kernel = kernel_for(device)
    comm = Nowhere(compiled.rank_plan, torch.Generator(device).manual_seed(0))
    tokens = compiled.num_tokens
    q = torch.randn(tokens, 8, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, 2, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    allowed = bytes_of_pass(plan, rank)
    slack = 8 << 20  # the allocator's rounding and a kernel's small workspace

    def peak(run: object) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()  # type: ignore[operator]
        return torch.cuda.max_memory_allocated() - before

    for _ in range(2):  # the first run compiles and caches
        forward = ForwardPass(q, k, v, compiled, comm, kernel, 0.1)
        used = peak(forward.run)
        assert forward.kv.peak_tokens == compiled.rank_plan.peak_forward.kv_tokens
    assert used <= allowed[0] + slack
    out, lse = ForwardPass(q, k, v, compiled, comm, kernel, 0.1).run()
    for _ in range(2):
        used = peak(lambda: BackwardPass(q, q, k, v, out, lse, compiled, comm, kernel, 0.1).run())
    assert used <= allowed[1] + slack


def two_process_rank(comm: Communicator) -> list[torch.Tensor]:
    """One of two processes on the same GPU."""
    device, plan = torch.device("cuda"), stream_plan(2)
    inputs = stream_inputs(plan, HEADS, torch.bfloat16)
    return attend(HostStagedTransport(comm), plan, inputs, kernel_for(device), device)


@pytest.fixture(scope="module")
def gloo() -> Iterator[GlooPool]:
    with GlooPool() as pool:
        yield pool


def test_two_processes_on_one_gpu(gloo: GlooPool) -> None:
    plan = stream_plan(2)
    inputs = stream_inputs(plan, HEADS, torch.bfloat16)
    first, second = (gloo.run(2, two_process_rank, timeout=240.0) for _ in range(2))
    for name, error in stream_errors(plan, inputs, first).items():
        assert error < STREAM_LIMITS[name], (name, error)
    for got, want in zip(second, first):
        assert all(torch.equal(a, b) for a, b in zip(got, want))
