"""Speed of every kernel adapter: single calls, and stages of blocks with their merges, forward and backward.

4096 queries attend to 16384 keys: in one call, and in stages of 512 to 16384 keys with the merges that the runtime does
(goal: at least 95% of the single call's speed). Causal documents of 512 to 32768 tokens show the rim of short calls.

    python benchmarks/gpu_kernels.py --out results
"""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu_common import machine, parser, seconds, write

from megatron_fcp.runtime.kernels import Gradients, Kernel, WorkList
from megatron_fcp.runtime.merge import Accumulator
from megatron_fcp.testing.gpu_checks import Heads, adapters, work_list

MODELS = {
    "Llama-3 70B, TP 1": Heads(64, 8, 128, 128),
    "Llama-3 70B, TP 8": Heads(8, 1, 128, 128),
    "MLA, TP 8": Heads(16, 16, 192, 128),
}
BACKWARD_FLOPS = 2.5


class Bench:
    """Inputs of one shape, and the timed runs on them."""

    def __init__(self, kernel: Kernel, heads: Heads, queries: int, keys: int, device: torch.device) -> None:
        def draw(rows: int, count: int, dim: int) -> torch.Tensor:
            return torch.empty(rows, count, dim, dtype=torch.bfloat16, device=device).normal_()

        self.kernel, self.heads, self.device, self.keys = kernel, heads, device, keys
        self.q = draw(queries, heads.num_heads, heads.head_dim_qk)
        self.k = draw(keys, heads.num_kv_heads, heads.head_dim_qk)
        self.v = draw(keys, heads.num_kv_heads, heads.head_dim_v)
        self.dout = draw(queries, heads.num_heads, heads.head_dim_v)
        self.scale = heads.head_dim_qk**-0.5

    def flops(self, pairs: float) -> float:
        return 2 * pairs * self.heads.num_heads * (self.heads.head_dim_qk + self.heads.head_dim_v)

    def single(self, work: WorkList) -> tuple[float, float]:
        """Seconds of a bare forward and a bare backward call."""
        out, lse = (t.clone() for t in self.kernel.forward(self.q, self.k, self.v, work, self.scale))
        out, lse = out.to(torch.bfloat16), lse.float().contiguous()
        into = self.accumulators()
        forward = seconds(lambda: self.kernel.forward(self.q, self.k, self.v, work, self.scale), self.device)
        args = (self.dout, self.q, self.k, self.v, out, lse, work, self.scale, into)
        return forward, seconds(lambda: self.kernel.backward(*args), self.device)

    def accumulators(self) -> Gradients:
        return Gradients(*(torch.zeros(t.shape, device=self.device) for t in (self.q, self.k, self.v)))

    def stages(self, block: int) -> tuple[float, float]:
        """Seconds of all keys in stages of ``block``, merges and sums of gradients included."""
        queries = len(self.q)
        work = work_list([(0, queries, 0, block)], False, block, self.device)
        pieces = [(self.k[i : i + block], self.v[i : i + block], i) for i in range(0, self.keys, block)]

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            total = Accumulator(queries, self.heads.num_heads, self.heads.head_dim_v, like=self.q)
            for k, v, start in pieces:
                out, lse = self.kernel.forward(self.q, k, v, work, self.scale)
                total.add(work.rows, out, lse, first=start == 0)
            whole, lse = total.finish()
            return whole.to(torch.bfloat16), lse

        out, lse = forward()
        into = self.accumulators()

        def backward() -> None:
            for k, v, start in pieces:
                part = Gradients(into.dq, into.dk[start : start + block], into.dv[start : start + block])
                self.kernel.backward(self.dout, self.q, k, v, out, lse, work, self.scale, part)

        return seconds(forward, self.device), seconds(backward, self.device)


def measure(kernel: Kernel, heads: Heads, device: torch.device, small: int) -> dict[str, Any]:
    """Figures of one adapter and model in TFLOP/s; ``small`` divides every length."""
    queries, keys = 4096 // small, 16384 // small
    bench = Bench(kernel, heads, queries, keys, device)
    flops = bench.flops(queries * keys)
    one = bench.single(work_list([(0, queries, 0, keys)], False, keys, device))
    out: dict[str, Any] = {"single call, 4K x 16K": rates(flops, one)}
    for block in (512, 1024, 2048, 4096, 8192, 16384):
        staged = bench.stages(block // small)
        out[f"stages of {block} keys"] = rates(flops, staged) | {
            "share of single call": {"forward": one[0] / staged[0], "backward": one[1] / staged[1]}
        }
    for length in (512, 2048, 8192, 32768):
        count = max(1, 32768 // length)
        n = length // small
        bench = Bench(kernel, heads, n * count, n * count, device)
        work = work_list([(i * n, i * n + n, i * n, i * n + n) for i in range(count)], True, n * count, device)
        out[f"causal documents of {length}"] = rates(bench.flops(count * n * (n + 1) / 2), bench.single(work))
    return out


def rates(flops: float, taken: tuple[float, float]) -> dict[str, Any]:
    """TFLOP/s of forward and backward."""
    return {"forward": flops / taken[0] / 1e12, "backward": BACKWARD_FLOPS * flops / taken[1] / 1e12}


def main() -> None:
    args = parser(__doc__).parse_args()
    device = torch.device(args.device)
    small = 1 if device.type == "cuda" else 64
    results: dict[str, Any] = {"machine": machine(device), "TFLOP/s": {}, "not measured": {}}
    deadline = time.monotonic() + args.seconds
    for model, heads in MODELS.items():
        kernels: dict[str, Kernel | str] = adapters(heads, device)
        if device.type != "cuda":
            from megatron_fcp.runtime.kernels.torch_cpu_flash import TorchCpuFlash

            kernels = {"torch-cpu": TorchCpuFlash()}
        for name, kernel in kernels.items():
            key = f"{model}, {name}"
            if isinstance(kernel, str) or time.monotonic() > deadline:
                results["not measured"][key] = kernel if isinstance(kernel, str) else "out of time"
                continue
            results["TFLOP/s"][key] = measure(kernel, heads, device, small)
            write(args.out / "kernels.json", results)
            print(key, flush=True)
            for row, figures in results["TFLOP/s"][key].items():
                share = figures.get("share of single call")
                tail = f"   {share['forward']:6.1%} {share['backward']:6.1%} of the single call" if share else ""
                print(f"  {row:28} {figures['forward']:8.1f} {figures['backward']:8.1f} TFLOP/s{tail}", flush=True)
    write(args.out / "kernels.json", results)


if __name__ == "__main__":
    main()
