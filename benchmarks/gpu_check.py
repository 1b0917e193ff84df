"""The GPU tests' checks of adapters and streams without pytest, for a machine that has PyTorch alone.

python benchmarks/gpu_check.py --out results
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from gpu_common import machine, parser, write

from megatron_fcp.runtime.kernels import Kernel
from megatron_fcp.testing.gpu_checks import (
    KERNEL_LIMITS,
    SHAPES,
    STREAM_LIMITS,
    WORK,
    Heads,
    adapters,
    attend,
    kernel_errors,
    stream_errors,
    stream_inputs,
    stream_plan,
)
from megatron_fcp.testing.stream_transport import StreamGroup

HEADS = Heads(8, 2, 128, 128)
SLEEP_CYCLES = 3_000_000


def streams(kernel: Kernel, cp_size: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Errors of a whole attention, and whether a sleeping stream changes any bit."""
    plan = stream_plan(cp_size)
    heads = HEADS if device.type == "cuda" else Heads(2, 1, 8, 8)
    inputs = stream_inputs(plan, heads, dtype)

    def run(victim: tuple[int, str] | None) -> list[list[torch.Tensor]]:
        def sleep(rank: int, stream: str) -> None:
            if (rank, stream) == victim and device.type == "cuda":
                torch.cuda._sleep(SLEEP_CYCLES)

        group = StreamGroup(cp_size, device, sleep)
        return group.run(lambda comm: attend(comm, plan, inputs, kernel, device, autograd=False))

    calm = run(None)
    differing = [
        f"rank {rank}, {stream}"
        for rank in range(cp_size)
        for stream in ("compute", "transfer")
        if not all(torch.equal(a, b) for got, want in zip(run((rank, stream)), calm) for a, b in zip(got, want))
    ]
    return {"errors": stream_errors(plan, inputs, calm), "bits changed by a sleeping": differing}


def main() -> None:
    args = parser(__doc__).parse_args()
    device = torch.device(args.device)
    torch.use_deterministic_algorithms(True)  # and with it, NaN in fresh memory
    results: dict[str, Any] = {"machine": machine(device), "failed": [], "kernels": {}, "not run": {}, "streams": {}}
    deadline = time.monotonic() + args.seconds
    tried = SHAPES if device.type == "cuda" else {"small": Heads(2, 1, 8, 8)}
    for shape, heads in tried.items():
        found: dict[str, Kernel | str] = adapters(heads, device)
        if device.type != "cuda":
            from megatron_fcp.runtime.kernels.torch_cpu_flash import TorchCpuFlash

            found = {"torch-cpu": TorchCpuFlash()}
        for name, kernel in found.items():
            for work in WORK if device.type == "cuda" else ("documents", "shared keys"):
                key = f"{name}, {shape}, {work}"
                if isinstance(kernel, str) or time.monotonic() > deadline:
                    results["not run"][key] = kernel if isinstance(kernel, str) else "out of time"
                    continue
                results["kernels"][key] = errors = kernel_errors(kernel, heads, work, device)
                if not all(error < KERNEL_LIMITS[part] for part, error in errors.items()):
                    results["failed"].append(key)
                print("ok  " if key not in results["failed"] else "FAIL", key, errors, flush=True)
                write(args.out / "check.json", results)
    found = adapters(HEADS, device) if device.type == "cuda" else found
    for name, kernel in found.items():
        for cp_size in (2, 4):
            if isinstance(kernel, str) or time.monotonic() > deadline:
                continue
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            key = f"{name}, streams of {cp_size} ranks"
            results["streams"][key] = outcome = streams(kernel, cp_size, device, dtype)
            wrong = not all(error < STREAM_LIMITS[part] for part, error in outcome["errors"].items())
            if outcome["bits changed by a sleeping"] or wrong:
                results["failed"].append(key)
            print("ok  " if key not in results["failed"] else "FAIL", key, outcome, flush=True)
    write(args.out / "check.json", results)
    if results["failed"]:
        sys.exit(f"failed: {results['failed']}")


if __name__ == "__main__":
    main()
