"""Planning time on one core, warm, under pytest-benchmark; also the curve of time over blocks.

    python benchmarks/planner.py                    the table
    python benchmarks/planner.py --curve FILE.png   and the curve

Measured is what a training step needs from ``make_plan``: lengths in, checked plan out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.simulate import draw_lengths, load_hardware

TOKENS_PER_RANK = 32768
BUDGET_S = {256: 0.050, 1024: 0.300}


def planner(workload: str, cp_size: int, hardware: str, seed: int = 0) -> Callable[[], Plan]:
    """A call that plans one draw."""
    lengths = draw_lengths(workload, num_tokens=cp_size * TOKENS_PER_RANK, seed=seed)
    cost = load_hardware(hardware).cost()
    return lambda: make_plan(lengths, cp_size=cp_size, tokens_per_rank=TOKENS_PER_RANK, hardware=cost)


@pytest.mark.parametrize("cp_size", BUDGET_S)
@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("workload", ["longtail", "weaktail", "bimodal"])
def test_planning_time(benchmark: Any, workload: str, hardware: str, cp_size: int) -> None:
    """Median of five warm plans; the budget is noted beside it, since this is a clock and not a property."""
    plan = benchmark.pedantic(planner(workload, cp_size, hardware), rounds=5, warmup_rounds=2)
    benchmark.extra_info["blocks"] = plan.table.num_blocks
    benchmark.extra_info["budget_s"] = BUDGET_S[cp_size]


def curve(path: str | None, hardware: str) -> None:
    """Print, and draw, planning time over the number of blocks: CPU time, the best of five."""
    points: list[tuple[int, int, float]] = []
    for cp_size in (16, 32, 64, 128, 256, 512, 1024):
        call = planner("longtail", cp_size, hardware)
        blocks = call().table.num_blocks
        call()
        times = []
        for _ in range(5):
            start = time.process_time()  # CPU time: other work on the machine counts little
            call()
            times.append(time.process_time() - start)
        points.append((cp_size, blocks, min(times)))
        print(f"{cp_size:5d} ranks {blocks:7d} blocks {points[-1][2] * 1e3:8.1f} ms")
    slope = np.polyfit(np.log([b for _, b, _ in points[2:]]), np.log([t for _, _, t in points[2:]]), 1)[0]
    print(f"time grows with blocks to the power of {slope:.2f} from 64 ranks on")
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.2, 3.2))
    axis.loglog([b for _, b, _ in points], [t * 1e3 for _, _, t in points], "o-", color="black")
    for cp_size, blocks, seconds in points:
        place = {"textcoords": "offset points", "xytext": (-5, 5), "ha": "right"}
        axis.annotate(f"{cp_size}", (blocks, seconds * 1e3), fontsize=8, **place)
    axis.margins(0.1)
    axis.set_xlabel("blocks (labels: ranks)")
    axis.set_ylabel("planning time, ms of one core")
    axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--curve", metavar="FILE.png")
    parser.add_argument("--hardware", default="h100-ib")
    args = parser.parse_args()
    curve(args.curve, args.hardware)
    columns = "--benchmark-columns=median,min,max,rounds"
    sys.exit(pytest.main([str(Path(__file__)), "-q", "-p", "no:cacheprovider", columns, "--benchmark-sort=name"]))
