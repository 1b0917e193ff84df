"""Kernels and links of this machine, timed, and fitted to the planner's cost model."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatron_fcp.plan.work import StageWork
from megatron_fcp.runtime.kernels import Gradients, WorkList, select_kernel
from megatron_fcp.simulate.kernel_fit import fit_kernel
from megatron_fcp.simulate.kernels import BACKWARD_FLOPS

REPEATS = 5
LINK_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)


class Sample(NamedTuple):
    """Least seconds of one full rectangle."""

    queries: int
    keys: int
    forward_s: float
    backward_s: float


class KernelRates(NamedTuple):
    """What a hardware file says about kernels; ``spread`` is the root mean square of the fit's relative errors."""

    flops: float
    q_half: float
    kv_half: float
    backward_rate: float
    spread: float


def shapes(longest: int) -> list[tuple[int, int]]:
    """(queries, keys) to measure: powers of two around what plans run."""
    sizes = [n for n in (64, 256, 1024, 2048, 4096, 8192, 16384) if n <= longest]
    return [(q, k) for q in sizes for k in sizes if q * k >= 256 * 256]


class KernelBench:
    """Times the kernel that ``auto`` would choose."""

    def __init__(self, device: str, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        if device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"--device {device}: this machine has no GPU that PyTorch can use; take --device cpu")
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.kernel, self.reason = select_kernel(
            device=self.device, dtype=self.dtype, head_dim_qk=head_dim, head_dim_v=head_dim, num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )  # fmt: skip
        self.flops_per_pair = 4 * num_heads * head_dim
        if device == "cpu":
            torch.set_num_threads(1)

    @property
    def name(self) -> str:
        """Of the kernel."""
        return f"{self.kernel.name} on {self.device.type}"

    def measure(self, queries: int, keys: int) -> Sample:
        """Time forward and backward of ``queries`` x ``keys``, full mask."""
        heads, kv_heads, dim = self.heads
        generator = torch.Generator().manual_seed(queries * 31 + keys)

        def tensor(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dim, generator=generator).to(self.device, self.dtype)

        q, dout, k, v = tensor(queries, heads), tensor(queries, heads), tensor(keys, kv_heads), tensor(keys, kv_heads)
        work = WorkList.from_stage(_rectangle(queries, keys), self.device)
        into = Gradients(*(torch.zeros(t.shape, dtype=torch.float32, device=self.device) for t in (q, k, v)))
        scale = dim**-0.5
        out, lse = self.kernel.forward(q, k, v, work, scale)
        forward = self._time(lambda: self.kernel.forward(q, k, v, work, scale))
        backward = self._time(lambda: self.kernel.backward(dout, q, k, v, out, lse, work, scale, into))
        return Sample(queries, keys, forward, backward)

    def _time(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            self._settle()
            start = time.perf_counter()
            call()
            self._settle()
            times.append(time.perf_counter() - start)
        return min(times)  # whatever else the machine does only adds

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _rectangle(queries: int, keys: int) -> StageWork:
    zero, q, k = (np.array([n], dtype=np.int64) for n in (0, queries, keys))
    return StageWork(zero, q, zero, k, False, keys, zero, np.array([0, keys], dtype=np.int64))


def fit_rates(samples: Sequence[Sample], flops_per_pair: int) -> KernelRates:
    """Forward's rate and half lengths by least squares, backward's rate by its median over the samples."""
    works = [[_rectangle(s.queries, s.keys)] for s in samples]
    fit = fit_kernel(works, np.array([s.forward_s for s in samples]), per_call=False)
    ratio = statistics.median(BACKWARD_FLOPS * s.forward_s / s.backward_s for s in samples)
    return KernelRates(flops_per_pair / fit.pair_s, fit.q_half, fit.kv_half, ratio, fit.error)


def measure_links(device: str) -> list[tuple[int, float]]:
    """(bytes, seconds) of one transfer between two processes, the other direction busy as well.

    Raises
    ------
    ValueError
        If one of the processes ends early.
    """
    backend = "gloo" if device == "cpu" else "nccl"
    if backend == "nccl" and torch.cuda.device_count() < 2:
        backend = "gloo"
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [context.Process(target=_link_worker, args=(r, port, backend, queue)) for r in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        if worker.is_alive():
            worker.kill()
        if worker.exitcode != 0:
            raise ValueError(f"measuring the link failed: a {backend} process ended with {worker.exitcode}")
    return queue.get()


def _link_worker(rank: int, port: int, backend: str, queue: torch.multiprocessing.SimpleQueue) -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=2)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    results = []
    for size in LINK_BYTES:
        mine, theirs = torch.zeros(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8)
        theirs = theirs.to(device)
        times = []
        for _ in range(2 * REPEATS):
            dist.barrier()
            start = time.perf_counter()
            works = [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)]
            for work in works:
                assert work is not None
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        results.append((size, min(times[2:])))
    if rank == 0:
        queue.put(results)
    dist.destroy_process_group()


def fit_link(links: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(latency in seconds, bytes per second): the smallest transfer, and the slope between the largest two."""
    latency = min(seconds for _, seconds in links)
    (small, fast), (large, slow) = sorted(links)[-2:]
    return latency, (large - small) / max(slow - fast, 1e-9)
