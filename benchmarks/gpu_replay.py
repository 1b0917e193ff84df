"""The long-tailed 256-rank plan replayed on this device against the simulator (goal: makespans within 10%).

Needs neither rich nor PyYAML, unlike ``megatron-fcp replay``, which does the same for any plan.

    python benchmarks/gpu_replay.py --out results [--cp-size 256] [--hardware h200-ib]
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from gpu_common import machine, parser, write

from megatron_fcp.commands.replay import combine, fit_pass
from megatron_fcp.plan.planfile import write_plan
from megatron_fcp.runtime.kernels import select_kernel
from megatron_fcp.runtime.replay import ReplayShape, StageSeconds, replay_rank
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import AttentionShape, load_hardware
from megatron_fcp.simulate.kernels import BACKWARD_FLOPS
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.workloads import draw_lengths


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--cp-size", type=int, default=256)
    p.add_argument("--tokens-per-rank", type=int, default=32768)
    p.add_argument("--num-heads", type=int, default=64)
    p.add_argument("--num-kv-heads", type=int, default=8)
    p.add_argument("--hardware", default="h200-ib")
    args = p.parse_args()
    device = torch.device(args.device)
    shape = AttentionShape(args.num_heads, args.num_kv_heads, 128)
    lengths = draw_lengths("longtail", num_tokens=args.cp_size * args.tokens_per_rank, seed=0)
    case = Case(lengths, args.cp_size, args.tokens_per_rank, load_hardware(args.hardware), shape)
    plan = fcp_plan(case)
    args.out.mkdir(parents=True, exist_ok=True)
    write_plan(plan, args.out / "longtail.json.gz")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel, reason = select_kernel(
        device=device, dtype=dtype, head_dim_qk=128, head_dim_v=128, num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
    )  # fmt: skip
    print(reason, flush=True)
    programs = [plan_program(plan, case, backward=b, wait_for_room=True) for b in (False, True)]
    heaviest_first = np.argsort(-programs[0].run().compute, kind="stable").tolist()
    deadline = time.monotonic() + args.seconds
    times: list[StageSeconds] = []
    for rank in heaviest_first:
        if times and time.monotonic() > deadline:
            break
        times.append(
            replay_rank(
                plan.rank_plan(rank), ReplayShape(args.num_heads, args.num_kv_heads, 128, 128, dtype), kernel, device
            )
        )
    results: dict[str, Any] = {"machine": machine(device), "plan": plan.digest, "kernel": kernel.name}
    results |= {"cp_size": args.cp_size, "ranks replayed": len(times), "network": args.hardware}
    fits = [fit_pass(plan, times, backward=b) for b in (False, True)]
    for backward, program, fit in zip((False, True), programs, fits):
        result = combine(plan, case, program, times, backward=backward)
        results["backward" if backward else "forward"] = figures = {
            "makespan_ms measured kernels": 1e3 * result.measured.makespan,
            "makespan_ms simulated": 1e3 * result.predicted.makespan,
            "measured over simulated": result.measured.makespan / result.predicted.makespan,
            "TFLOP/s per rank": result.tflops(result.measured),
            "kernel seconds, measured over simulated": {
                "lowest": float(result.ratio.min()), "median": float(np.median(result.ratio)),
                "highest": float(result.ratio.max()),
            },
            "fit": dataclasses.asdict(fit) if fit else None,
        }  # fmt: skip
        print("backward" if backward else "forward", figures, flush=True)
    write(args.out / "replay.json", results)
    forward, back = fits
    if forward is not None and back is not None:
        model = dataclasses.replace(
            case.hardware, name=f"{args.hardware}-replayed", kernel_flops=shape.flops_per_pair / forward.pair_s,
            backward_rate=forward.pair_s * BACKWARD_FLOPS / back.pair_s, q_half=forward.q_half, kv_half=forward.kv_half,
        )  # fmt: skip
        text = "".join(f"{name}: {value}\n" for name, value in dataclasses.asdict(model).items())
        head = f"# kernel figures measured by benchmarks/gpu_replay.py: {results['machine']}\n"
        (args.out / "hardware.yaml").write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    main()
