"""What the GPU tests compute, tried on the CPU: their checks pass for a right kernel and fail for a wrong one."""

from __future__ import annotations

import pytest
import torch

from megatron_fcp.runtime.kernels import Kernel, WorkList
from megatron_fcp.runtime.kernels.reference import Reference
from megatron_fcp.runtime.kernels.torch_cuda_flash import TorchCudaFlash
from megatron_fcp.testing.gpu_checks import (
    KERNEL_LIMITS,
    Heads,
    attend,
    kernel_errors,
    stream_errors,
    stream_inputs,
    stream_plan,
)
from megatron_fcp.testing.kernel_standins import aten_stand_in
from megatron_fcp.testing.stream_transport import StreamGroup

pytestmark = pytest.mark.runtime

CPU, SMALL = torch.device("cpu"), Heads(2, 1, 8, 8)


@pytest.mark.parametrize("work", ["documents", "shared keys", "window", "edge of a window"])
def test_a_right_kernel_passes(work: str) -> None:
    kernel = TorchCudaFlash(*aten_stand_in())
    errors = kernel_errors(kernel, SMALL, work, CPU)
    assert all(0 < error < KERNEL_LIMITS[name] for name, error in errors.items()), errors


class OffBase(Reference):
    """A log-sum-exp that is off by a constant, as one of another base would be."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: WorkList, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(q, k, v, work, scale)
        return out, lse + 0.05


def test_a_wrong_kernel_does_not() -> None:
    errors = kernel_errors(OffBase(), SMALL, "blocks", CPU)
    assert errors["lse"] > KERNEL_LIMITS["lse"]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_streams_of_the_cpu(cp_size: int) -> None:
    plan = stream_plan(cp_size)
    inputs = stream_inputs(plan, SMALL, torch.float64)
    kernel: Kernel = Reference()
    results = StreamGroup(cp_size, CPU).run(lambda comm: attend(comm, plan, inputs, kernel, CPU, autograd=False))
    assert all(error < 1e-12 for error in stream_errors(plan, inputs, results).values())
