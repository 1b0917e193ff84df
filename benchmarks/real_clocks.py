"""Attention forward and backward on this machine's clock: FCP against rings, on gloo ranks with one thread each.

    pip install -r benchmarks/requirements.txt
    python benchmarks/real_clocks.py

All contenders take bfloat16 and run the same kernel (PyTorch's flash attention for CPUs, in float32, since its 16-bit
backward is far slower) in the same processes, turn by turn, so that whatever else the machine does hits all of them;
what counts are ratios per turn. Each one's result is compared with the single-rank result first. Documents are those of
the workloads with every length divided by ``--shrink``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from contenders import CONTENDERS, Contender, RingFlashAttn, Setup, Whole

from megatron_fcp.runtime import Communicator
from megatron_fcp.simulate import HardwareModel, draw_lengths, load_hardware

# One core and gloo between processes, as `megatron-fcp profile` measured on a two-core server.
LOCAL = HardwareModel("local", 74e9, 0.98, 12, 13, 1.8e9, 1.8e9, 111e-6, 1, 25e9, 2, 0)
TOLERANCE = 0.03  # of the largest value: bfloat16, against one kernel call per document


def scaled_lengths(workload: str, num_tokens: int, shrink: int, seed: int) -> np.ndarray:
    """Lengths of ``workload`` divided by ``shrink``, at least 16 tokens, filling ``num_tokens``."""
    drawn = np.maximum(draw_lengths(workload, num_tokens=num_tokens * shrink, seed=seed) // shrink, 16)
    kept = drawn[: int(np.searchsorted(np.cumsum(drawn), num_tokens)) + 1]
    kept[-1] -= max(int(kept.sum()) - num_tokens, 0)
    return kept[kept > 0]


def worker(rank: int, args: argparse.Namespace, port: int, folder: str) -> None:
    """One rank: build the contenders, check them, time them."""
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    comm = Communicator.create(range(args.ranks), 300.0, "real clocks")
    group = dist.group.WORLD
    assert group is not None
    results = []
    for workload in args.workloads:
        lengths = scaled_lengths(workload, args.ranks * args.tokens_per_rank, args.shrink, args.seed)
        lengths = np.append(lengths, args.ranks * args.tokens_per_rank - lengths.sum())
        setup = Setup(
            lengths[lengths > 0], rank, args.ranks, group, comm, args.num_heads, args.num_kv_heads, args.head_dim,
            args.block_size, LOCAL if args.hardware is None else load_hardware(args.hardware),
        )  # fmt: skip
        results.append({"workload": workload, "documents": int((lengths > 0).sum()), **measure(setup, args)})
        if rank == 0:
            print(report(results[-1], args.ranks), flush=True)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(setup: Setup, args: argparse.Namespace) -> dict[str, object]:
    """Seconds of every turn of every contender, the slowest rank's."""
    contenders: list[Contender] = []
    for kind in CONTENDERS:
        try:
            contenders.append(kind(setup))
        except ImportError as error:
            if kind is not RingFlashAttn:
                raise
            if setup.rank == 0:
                print(f"left out {kind.name}: {error}; pip install -r benchmarks/requirements.txt", file=sys.stderr)
    total = int(setup.lengths.sum())
    generator = torch.Generator().manual_seed(args.seed)
    heads = (setup.num_heads, setup.num_kv_heads, setup.num_kv_heads, setup.num_heads)
    stream = [torch.randn(total, h, setup.head_dim, generator=generator).bfloat16() for h in heads]
    inputs = [[_rows(t, c.rows) for t in stream] for c in contenders]
    expected = contenders[-1].run(*inputs[-1])
    errors = {}
    for contender, given in zip(contenders, inputs):
        got = contender.run(*given)  # warms up as well
        errors[contender.name] = _worst_error(got, expected, contender.rows)
    assert max(errors.values()) < TOLERANCE, errors
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    for _ in range(args.turns):
        for contender, given in zip(contenders, inputs):
            dist.barrier()
            start = time.perf_counter()
            contender.run(*given)
            mine = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            seconds[contender.name].append(float(mine))
    return {"seconds": seconds, "errors": errors}


def _rows(stream: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    out = stream.new_zeros(rows.size, *stream.shape[1:])
    real = torch.from_numpy(np.flatnonzero(rows >= 0))
    out[real] = stream[torch.from_numpy(rows[rows >= 0])]
    return out


def _worst_error(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], rows: np.ndarray) -> float:
    real = np.flatnonzero(rows >= 0)
    index, tokens = torch.from_numpy(real), torch.from_numpy(rows[real])
    return max(float((g[index] - e[tokens]).abs().max() / e.abs().max()) for g, e in zip(got, expected))


def report(result: dict[str, object], ranks: int) -> str:
    """A table of one workload."""
    seconds: dict[str, list[float]] = result["seconds"]  # type: ignore[assignment]
    ours = seconds["fcp"]
    lines = [f"{result['workload']}: {result['documents']} documents, {ranks} ranks, forward + backward"]
    for name, times in seconds.items():
        if name == Whole.name:
            share = [t / ranks / o for t, o in zip(times, ours)]
            best = f"best turns {min(times) / ranks / min(ours):.0%}"
            lines.append(
                f"  fcp reaches {statistics.median(share):.0%} of the compute bound ({_spread(share)}; {best})"
            )
            continue
        ratio = [t / o for t, o in zip(times, ours)]
        middle = f"{statistics.median(times):8.3f} s   {statistics.median(ratio):5.2f}x of fcp"
        best = f"best turns {min(times) / min(ours):.2f}x"
        lines.append(f"  {name:<26}{middle} ({_spread(ratio)}; {best})")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f} over {len(values)} turns"


def main() -> None:
    """Parse, start the ranks, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", nargs="+", default=["longtail", "weaktail", "bimodal"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens-per-rank", type=int, default=8192)
    parser.add_argument("--shrink", type=int, default=8, help="divide the workload's lengths (default: %(default)s)")
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--num-kv-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, help="default: the planner's choice")
    parser.add_argument(
        "--hardware", metavar="FILE", help="from `megatron-fcp profile` (default: a typical server core)"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write all times")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(worker, (args, port, folder), nprocs=args.ranks, start_method="spawn")  # pyright: ignore[reportPrivateImportUsage]
        if args.json:
            Path(args.json).write_text(Path(folder, "results.json").read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
