"""Does moving one group of heads while attending to another pay on this machine? Ratios against one group.

    python benchmarks/reshuffle_overlap.py [--ranks 2] [--tokens 4096] [--turns 7]

Real processes over gloo, one thread each; forward and backward of one attention in the reshuffle layout; the numbers of
groups take turns within a process, and each turn's time is divided by that of one group in the same turn. gloo moves
bytes with the same cores that attend, so little can overlap here: what it shows is what groups cost.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time

import torch
import torch.distributed as dist

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.route import make_route
from megatron_fcp.plan.sharding import zigzag
from megatron_fcp.runtime import Communicator, CompiledPlan, CompiledRoute, reshuffled_attention, select_kernel
from megatron_fcp.simulate.workloads import draw_lengths
from megatron_fcp.testing.gloo_pool import GlooPool

HEADS, KV_HEADS, HEAD_DIM = 16, 4, 64
GROUPS = (1, 2, 4)


def measure(comm: Communicator, tokens: int, turns: int) -> list[list[float]]:
    """Seconds of each turn (rows) with each number of groups (columns)."""
    lengths = draw_lengths("longtail", num_tokens=tokens * comm.size, seed=0)
    plan = make_plan(lengths, cp_size=comm.size, tokens_per_rank=tokens, config=FcpConfig(block_size=256))
    inside = [plan.rank_plan(r).local_token_global_indices for r in range(comm.size)]
    route = CompiledRoute(make_route(zigzag(tokens * comm.size, comm.size), inside).rank_route(comm.rank))
    compiled = CompiledPlan(plan.rank_plan(comm.rank))
    kernel, _ = select_kernel(
        "auto",
        device=torch.device("cpu"),
        dtype=torch.float32,
        head_dim_qk=HEAD_DIM,
        head_dim_v=HEAD_DIM,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
    )
    g = torch.Generator().manual_seed(comm.rank)
    q, k, v = (torch.randn(tokens, n, HEAD_DIM, generator=g).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS))
    dout = torch.randn(tokens, HEADS, HEAD_DIM, generator=g)
    rows: list[list[float]] = []
    for _ in range(turns + 1):
        row: list[float] = []
        for groups in GROUPS:
            dist.barrier(comm.group)
            start = time.perf_counter()
            out = reshuffled_attention(q, k, v, plan=compiled, route=route, comm=comm, kernel=kernel, max_groups=groups)
            out.backward(dout)
            dist.barrier(comm.group)
            row.append(time.perf_counter() - start)
        rows.append(row)
    return rows[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    with GlooPool() as pool:
        importable = importlib.import_module("reshuffle_overlap").measure  # the ranks look it up by name
        rows = pool.run(options.ranks, importable, options.tokens, options.turns)[0]
    print(f"{options.ranks} ranks, {options.tokens} tokens each, longtail, {options.turns} turns")
    for column, groups in enumerate(GROUPS):
        seconds = statistics.median(row[column] for row in rows)
        ratios = [row[column] / row[0] for row in rows]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{groups} groups: {seconds * 1e3:8.1f} ms, {statistics.median(ratios):.2f} of one group ({spread})")


if __name__ == "__main__":
    main()
