"""What a layer asks of the host: it never waits for the device, and issues a bounded number of operations per stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.runtime.attention import BackwardPass, ForwardPass
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels.torch_cuda_flash import TorchCudaFlash
from megatron_fcp.runtime.transport import Position

pytestmark = pytest.mark.runtime

# Operations that start no work on a device: views, allocation, wrapping of constants.
FREE = ("slice", "transpose", "alias", "unsqueeze", "squeeze", "select", "view", "lift_fresh", "detach", "permute")
FREE += ("new_empty", "empty", "empty_like", "expand")


class Silent:
    """A transport that is through at once and moves nothing."""

    in_order = True

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self.size, self.position = rank, plan.cp_size, Position()

    def post(self, sends: object, recvs: object) -> Silent:
        return self

    def wait_recvs(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Counter(TorchDispatchMode):
    """Counts operations that would start work on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[list[str]]:
    with Counter() as counter:
        yield counter.names


@pytest.fixture(scope="module")
def plan() -> Plan:
    lengths = [700, 30, 1, 64, 5, 90, 120, 2]
    return make_plan(lengths, cp_size=4, tokens_per_rank=256, config=FcpConfig(block_size=16, rounds_per_stage=1))


def passes(plan: Plan, compiled: CompiledPlan) -> tuple[ForwardPass, BackwardPass]:
    """Both passes on the ``meta`` device, whose tensors have no values: whoever asks for one gets an error."""
    q = torch.empty(256, 4, 16, dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(256, 2, 16, dtype=torch.bfloat16, device="meta") for _ in range(2))
    kernel, comm = (
        TorchCudaFlash(),
        Silent(plan, compiled.rank_plan.rank),
    )  # the real operators, by their fake implementations
    lse = torch.empty(256, 4, device="meta")
    forward = ForwardPass(q, k, v, compiled, comm, kernel, 0.25)
    return forward, BackwardPass(q, q, k, v, q, lse, compiled, comm, kernel, 0.25)


@pytest.mark.parametrize("rank", range(4))
def test_no_layer_waits_for_the_device(plan: Plan, rank: int) -> None:
    """A host synchronisation is a value on its way to the host; meta tensors have none to give."""
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty(1, device="meta").item()
    forward, backward = passes(plan, CompiledPlan(plan.rank_plan(rank), "meta"))
    out, lse = forward.run()
    assert (out.shape, lse.shape) == ((256, 4, 16), (256, 4))
    dq, dk, dv = backward.run()
    assert (dq.dtype, dk.shape, dv.shape) == (torch.bfloat16, (256, 2, 16), (256, 2, 16))


@pytest.mark.parametrize("rank", range(4))
def test_operations_per_stage_are_bounded(plan: Plan, rank: int) -> None:
    """Two dozen per stage and ten per further kernel call; in backward also one per received segment of K and of V."""
    compiled = CompiledPlan(plan.rank_plan(rank), "meta")
    for pass_ in passes(plan, compiled):
        pass_.run()  # builds the index arrays of the calls, which every layer of the batch then uses
    forward, backward = passes(plan, compiled)
    stages = sum(any(work.items for work in calls) for calls in compiled.calls)
    assert stages > 1
    with counting() as names:
        forward.run()
    calls = names.count("_flash_attention_forward")
    assert calls >= stages
    assert len(names) <= 24 * stages + 10 * (calls - stages), sorted(names)
    with counting() as names:
        backward.run()
    segments = sum(len(t.segments) for step in compiled.rank_plan.backward for t in getattr(step, "recvs", ()))
    calls = names.count("_flash_attention_backward")
    assert calls >= stages
    assert len(names) <= 24 * stages + 10 * (calls - stages) + 2 * segments, sorted(names)
