"""What attention loses to transfers beside it, and what reserving SMs for them changes.

Attention (4096 queries, 16384 keys) runs alone, then beside copies of KV-sized buffers on a high-priority stream, which
stand for NCCL's kernels on a machine with one GPU; then, where PyTorch has green contexts, on fewer SMs.

    python benchmarks/gpu_overlap.py --out results
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_common import machine, parser, seconds, write
from gpu_kernels import Bench

from megatron_fcp.runtime.kernels import Kernel
from megatron_fcp.testing.gpu_checks import Heads, adapters, work_list

HEADS = Heads(64, 8, 128, 128)
QUERIES, KEYS = 4096, 16384


def green_context(sms: int, device: torch.device) -> Any:
    """A context of ``sms`` SMs; raises where this PyTorch, driver or GPU has none."""
    from torch.cuda.green_contexts import GreenContext

    return GreenContext.create(num_sms=sms, device_id=device.index or 0)


def main() -> None:
    args = parser(__doc__).parse_args()
    device = torch.device(args.device)
    results: dict[str, Any] = {"machine": machine(device), "ms": {}, "not measured": {}}
    if device.type != "cuda":
        results["not measured"]["all"] = "needs a GPU"
        write(args.out / "overlap.json", results)
        print("needs a GPU")
        return
    work = work_list([(0, QUERIES, 0, KEYS)], False, KEYS, device)
    stream = torch.cuda.Stream(device, priority=-1)
    source = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for name, kernel in adapters(HEADS, device).items():
        if isinstance(kernel, str):
            results["not measured"][name] = kernel
            continue
        bench = Bench(kernel, HEADS, QUERIES, KEYS, device)

        def attention(kernel: Kernel = kernel, bench: Bench = bench) -> None:
            kernel.forward(bench.q, bench.k, bench.v, work, bench.scale)

        def beside(attention: Any = attention) -> None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(4):
                    target.copy_(source)
            attention()
            torch.cuda.current_stream().wait_stream(stream)

        figures = {"alone": 1e3 * seconds(attention, device), "beside 1 GB of copies": 1e3 * seconds(beside, device)}
        total = torch.cuda.get_device_properties(device).multi_processor_count
        for reserved in (8, 16, 24):
            try:
                context = green_context(total - reserved, device)
                context.set_context()
                try:
                    figures[f"on {total - reserved} SMs"] = 1e3 * seconds(attention, device)
                finally:
                    context.pop_context()
            except (ImportError, RuntimeError, AttributeError) as error:
                results["not measured"][f"{name}, green context"] = str(error).splitlines()[0]
                break
        results["ms"][name] = figures
        print(name, {k: round(v, 3) for k, v in figures.items()}, flush=True)
        write(args.out / "overlap.json", results)
    write(args.out / "overlap.json", results)


if __name__ == "__main__":
    main()
