"""Python time of FCP per communication round and per compute stage, on the host alone.

A GPU runs behind its host as long as the host issues work faster than the GPU does it. Here the rounds and stages of
a real plan are issued with tensors so small that only the issuing counts: the communicator's code over a process group
that transfers nothing, the runtime's code, its torch operations (on this CPU, where a GPU would add a launch of a few
microseconds each), and a kernel that only allocates its results. Times are CPU times of the issuing thread, so that a
busy machine does not blur them.

    python benchmarks/host_overhead.py [--cp-size 256] [--ranks 4] [--repeats 20] [--json] [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_fcp.plan import Plan
from megatron_fcp.plan.program import Compute, Exchange, Reduce, Release, Step
from megatron_fcp.runtime.attention import BackwardPass, ForwardPass
from megatron_fcp.runtime.communicator import Communicator
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels import Kernel
from megatron_fcp.runtime.kernels.torch_cuda_flash import TorchCudaFlash
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import load_hardware
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.workloads import draw_lengths

SHRINK = 128  # tokens that one token stands for: the rounds and stages of the real plan, next to no arithmetic
BUDGET_US = {"round": 200.0, "stage": 400.0}
LABELS = {Exchange: "round", Compute: "stage", Reduce: "reduce", Release: "release"}


def small_plan(cp_size: int, seed: int) -> Plan:
    """The planner's plan of the long-tailed workload, 32K tokens per rank, on H100: lengths and rates shrunk alike."""
    lengths = draw_lengths("longtail", num_tokens=cp_size * 32768, seed=seed) // SHRINK
    h100 = load_hardware("h100-ib")
    small = dataclasses.replace(
        h100,
        kernel_flops=h100.kernel_flops / SHRINK**2,
        q_half=h100.q_half / SHRINK,
        kv_half=h100.kv_half / SHRINK,
        inter_bytes_per_s=h100.inter_bytes_per_s / SHRINK,
        intra_bytes_per_s=h100.intra_bytes_per_s / SHRINK,
    )
    return fcp_plan(Case(lengths, cp_size, 32768 // SHRINK, small))


def kernel_without_work() -> Kernel:
    """An adapter of variable-length kernels whose kernel only allocates results."""

    def forward(q: torch.Tensor, *_: Any, **__: Any) -> Any:
        return torch.empty_like(q), torch.zeros(q.shape[1], q.shape[0])

    def backward(_: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any) -> Any:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    return TorchCudaFlash(forward, backward)


class Watch:
    """Seconds and number of steps by kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.count: dict[str, int] = defaultdict(int)

    def wrap(self, run: Any) -> Any:
        def timed(step: Step) -> None:
            before = time.thread_time()
            run(step)
            self.seconds[LABELS[type(step)]] += time.thread_time() - before
            self.count[LABELS[type(step)]] += 1

        return timed

    def microseconds(self) -> dict[str, float]:
        return {kind: 1e6 * self.seconds[kind] / self.count[kind] for kind in self.seconds}


def communicator(rank: int, size: int) -> Communicator:
    """FCP's communicator over a group whose transfers are done at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return Communicator(dist.group.WORLD, 600.0, "host overhead", store=dist.HashStore())


def measure(plan: Plan, rank: int, repeats: int) -> dict[str, Any]:
    """Median microseconds per round and stage of forward and backward, and of a whole pass."""
    comm = communicator(rank, plan.cp_size)
    compiled = CompiledPlan(plan.rank_plan(rank))
    kernel = kernel_without_work()
    tokens = compiled.num_tokens
    q = torch.randn(tokens, 2, 8)
    k, v = torch.randn(tokens, 1, 8), torch.randn(tokens, 1, 8)
    samples: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 2):
        for name in ("forward", "backward"):
            watch = Watch()
            begin = time.thread_time()
            if name == "forward":
                forward = ForwardPass(q, k, v, compiled, comm, kernel, 0.3)
                forward._run = watch.wrap(forward._run)  # type: ignore[method-assign]
                out, lse = forward.run()
            else:
                backward = BackwardPass(torch.ones_like(out), q, k, v, out, lse, compiled, comm, kernel, 0.3)
                backward._run = watch.wrap(backward._run)  # type: ignore[method-assign]
                backward.run()
            if repeat >= 2:
                samples[f"{name}, whole pass"].append(1e6 * (time.thread_time() - begin))
                for kind, value in watch.microseconds().items():
                    samples[f"{name}, per {kind}"].append(value)
    comm.close()
    dist.destroy_process_group()
    steps = compiled.rank_plan.forward
    counts = {label: sum(isinstance(s, kind) for s in steps) for kind, label in LABELS.items()}
    return {
        "rank": rank,
        "rounds": counts["round"],
        "stages": counts["stage"],
        "operations": sum(2 * len(t.segments) for s in steps if isinstance(s, Exchange) for t in (*s.sends, *s.recvs)),
        "us": {k: float(np.median(v)) for k, v in samples.items()},
    }


def spread_by_rounds(plan: Plan, count: int) -> list[int]:
    """Ranks from the fewest to the most rounds, evenly spaced in that order."""
    m, round_ = plan.schedule.messages, plan.schedule.message_round
    both = np.unique(np.stack([np.concatenate([m.src, m.dst]), np.concatenate([round_, round_])]), axis=1)
    order = np.argsort(np.bincount(both[0], minlength=plan.cp_size), kind="stable")
    return [int(order[i]) for i in np.linspace(0, plan.cp_size - 1, count).round().astype(int)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp-size", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4, help="ranks to measure, from fewest to most rounds")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 beyond the budget, in us: {BUDGET_US}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = small_plan(args.cp_size, 0)
    ranks = spread_by_rounds(plan, args.ranks)
    begin = time.thread_time()
    for rank in ranks:
        CompiledPlan(plan.rank_plan(rank))
    compile_us = 1e6 * (time.thread_time() - begin) / len(ranks)
    results = [measure(plan, rank, args.repeats) for rank in ranks]
    keys = results[0]["us"]
    mean = {key: float(np.mean([r["us"][key] for r in results])) for key in keys}
    figures = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cp_size": args.cp_size,
        "rounds": [r["rounds"] for r in results],
        "stages": [r["stages"] for r in results],
        "sends and receives": [r["operations"] for r in results],
        "derive and compile a rank's plan, once per batch": compile_us,
        "us": mean,
    }
    over = {
        k: v for k, v in mean.items() for kind, limit in BUDGET_US.items() if k.endswith(f"per {kind}") and v > limit
    }
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        _print(figures, ranks, compile_us)
    if args.check and over:
        sys.exit(f"over budget: {over}")


def _print(figures: dict[str, Any], ranks: list[int], compile_us: float) -> None:
    print(
        f"{figures['cpu']}, Python {figures['python']}, torch {figures['torch']}; ranks {ranks} of {figures['cp_size']}"
    )
    print(f"rounds {figures['rounds']}, sends and receives {figures['sends and receives']}, stages {figures['stages']}")
    print(f"{compile_us:9.0f} us  derive and compile a rank's plan, once per batch")
    for key, value in figures["us"].items():
        print(f"{value:9.1f} us  {key}")


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    main()
