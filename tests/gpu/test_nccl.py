"""The communicator over NCCL, one process per GPU. Not yet run on GPUs."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fcp.runtime.communicator import Communicator
from megatron_fcp.runtime.kernels import select_kernel
from megatron_fcp.testing.gpu_checks import STREAM_LIMITS, Heads, attend, stream_errors, stream_inputs, stream_plan

pytestmark = pytest.mark.multigpu

HEADS = Heads(8, 2, 128, 128)
SLEEP_CYCLES = 3_000_000


class Sleepy:
    """A communicator whose rank puts one of its streams to sleep before every round."""

    def __init__(self, comm: Communicator, stream: str) -> None:
        self.comm, self.stream = comm, stream
        self.rank, self.size, self.position, self.in_order = comm.rank, comm.size, comm.position, comm.in_order
        self.side = torch.cuda.Stream(comm.device)

    def post(self, sends: object, recvs: object) -> object:
        if self.stream == "compute":
            torch.cuda._sleep(SLEEP_CYCLES)
        elif self.stream == "transfer":
            self.side.wait_stream(torch.cuda.current_stream(self.comm.device))
            with torch.cuda.stream(self.side):  # NCCL's stream waits for the one that posts
                torch.cuda._sleep(SLEEP_CYCLES)
                return self.comm.post(sends, recvs)  # type: ignore[arg-type]
        return self.comm.post(sends, recvs)  # type: ignore[arg-type]


def rank_of_job(rank: int, size: int, port: int, max_ctas: int | None, folder: str) -> None:
    """One GPU: the calm run, then runs in which one stream of one rank sleeps; all bits must agree."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    comm = Communicator.create(range(size), 120.0, "test", device=device, max_ctas=max_ctas)
    plan = stream_plan(size)
    inputs = stream_inputs(plan, HEADS, torch.bfloat16)
    kernel, _ = select_kernel(
        device=device, dtype=torch.bfloat16, head_dim_qk=128, head_dim_v=128, num_heads=8, num_kv_heads=2
    )
    comm.agree(plan.digest)
    calm = attend(comm, plan, inputs, kernel, device)
    for victim in range(size):
        for stream in ("compute", "transfer"):
            transport = Sleepy(comm, stream) if victim == rank else comm
            again = attend(transport, plan, inputs, kernel, device)  # type: ignore[arg-type]
            assert all(torch.equal(a, b) for a, b in zip(calm, again)), (victim, stream)
    torch.save(calm, Path(folder) / f"{rank}.pt")
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize("max_ctas", [None, 4])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_nccl(size: int, max_ctas: int | None) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, found {torch.cuda.device_count()}")
    plan = stream_plan(size)
    inputs = stream_inputs(plan, HEADS, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, free_port(), max_ctas, folder)
        torch.multiprocessing.spawn(rank_of_job, args=arguments, nprocs=size)  # type: ignore[attr-defined]
        results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]
    for name, error in stream_errors(plan, inputs, results).items():
        assert error < STREAM_LIMITS[name], (name, error)
