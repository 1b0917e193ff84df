"""Train through Megatron's own loop on four CPU ranks with FCP and once on one rank, and compare.

    python examples/quickstart.py            (or `make quickstart`, which installs first)

Real documents (the Python standard library, one document per source file), Megatron's indexed dataset, optimizer and
schedule; ends with a table, and a picture of the placement in ``quickstart/placement.png``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fcp.commands.picture import placement_picture
from megatron_fcp.plan.planfile import read_plan
from megatron_fcp.plan.report import PlanReport, report
from megatron_fcp.testing.loop import PRETRAIN_SCRIPT, TINY_MODEL, TINY_RUN, to_argv

ROOT = Path(__file__).resolve().parents[1]
STEP = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([\d.E+-]+)")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE_BYTES = 2, 1, 32, 4


@dataclass
class Run:
    """Losses and times of one training run."""

    name: str
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)


def training_flags(options: argparse.Namespace, out: Path, **overrides: object) -> list[str]:
    """Megatron's command line, but for the context-parallel flags."""
    return to_argv(
        {
            **TINY_MODEL,
            **TINY_RUN,
            "mock_data": None,
            "distributed_timeout_minutes": None,
            "num_attention_heads": NUM_HEADS,
            "num_query_groups": NUM_KV_HEADS,
            "kv_channels": HEAD_DIM,
            "seq_length": options.seq_length,
            "max_position_embeddings": options.seq_length,
            "data_path": str(out / "stdlib"),
            "data_cache_path": str(out / "cache"),
            "dataloader_inter_document_masking": True,
            "global_batch_size": 1,
            "train_iters": options.steps,
            **overrides,
        }
    )


def initial_weights(options: argparse.Namespace, out: Path) -> Path:
    """Checkpoint that both runs start from: what Megatron draws at first depends on the number of ranks.

    Megatron saves only after a step, so this is one step at learning rate zero, on a short sequence.
    """
    path = out / "weights"
    once = {"train_iters": 1, "lr": 0, "min_lr": 0, "seq_length": 128, "save": path, "save_interval": 1}
    flags = training_flags(options, out, **once, ckpt_format="torch_dist", no_save_optim=True)
    train("initial weights", 1, [*flags, "--context-parallel-backend", "fcp"], out / "weights.log")
    return path


def train(name: str, num_ranks: int, flags: list[str], log: Path) -> Run:
    """Run the pretraining script under torchrun, show each step, and return its losses."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    # Port 0: torchrun takes a free one itself.
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["-m", "megatron_fcp.run", "--fcp-platform", "cpu", str(PRETRAIN_SCRIPT), *flags]
    run = Run(name)
    print(f"\n{name}: {num_ranks} rank{'s' if num_ranks > 1 else ''} (starting Megatron; log in {log})", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            if found := STEP.search(line):
                run.losses.append(float(found[3]))
                run.step_ms.append(float(found[2]))
                print(f"  step {found[1]:>3}   loss {run.losses[-1]:.6f}   {run.step_ms[-1]:8.0f} ms", flush=True)
    if process.returncode:
        tail = "".join(log.read_text().splitlines(keepends=True)[-40:])
        sys.exit(f"{tail}\n{name} stopped with exit code {process.returncode}; the end of {log} is above")
    return run


def loss_table(one: Run, many: Run) -> str:
    """Losses of both runs side by side, and their largest relative difference."""
    lines = [f"{'step':>4}  {one.name:>12}  {many.name:>12}  {'difference':>10}"]
    worst = 0.0
    for step, (a, b) in enumerate(zip(one.losses, many.losses, strict=True), start=1):
        difference = abs(a - b) / abs(a)
        worst = max(worst, difference)
        lines.append(f"{step:>4}  {a:>12.6f}  {b:>12.6f}  {difference:>10.1e}")
    return "\n".join([*lines, f"largest relative difference of the loss: {worst:.1e}"])


def plan_table(reports: list[PlanReport], one: Run, many: Run) -> str:
    """What the plans of the run did, as medians over its batches."""
    median = statistics.median
    moved = median([r.kv_megabytes for r in reports])
    ring = median([r.ring_megabytes for r in reports])
    rounds = sorted({(r.rounds, r.rounds_lower_bound) for r in reports})
    rows = [
        ("tokens per rank (all ranks alike)", f"{reports[0].tokens_per_rank}"),
        ("compute balance, busiest / mean", f"{median([r.compute_imbalance for r in reports]):.3f}"),
        ("KV moved per layer, forward", f"{moved:.3f} MB"),
        ("  a zig-zag ring would move", f"{ring:.3f} MB ({ring / moved if moved else float('inf'):.1f}x)"),
        ("rounds / lower bound", ", ".join(f"{a}/{b}" for a, b in rounds)),
        ("step time, median: 1 rank", f"{median(one.step_ms[1:]):.0f} ms"),
        ("step time, median: 4 ranks", f"{median(many.step_ms[1:]):.0f} ms ({os.cpu_count()} cores)"),
    ]
    return "\n".join(f"{name:<36} {value}" for name, value in rows)


def main() -> None:
    """Build the corpus, train twice, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seq-length", type=int, default=16384, help="tokens of the packed stream")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--layout", choices=("reshuffle", "resident"), default="resident")
    parser.add_argument("--out", type=Path, default=ROOT / "quickstart", help="folder for corpus, logs and picture")
    options = parser.parse_args()
    began = time.monotonic()
    out: Path = options.out
    if out.exists() and any(out.iterdir()) and not (out / "stdlib.bin").exists():
        parser.error(f"--out {out} holds other files, and the quickstart empties its folder; name a new one")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    print("Corpus: the Python standard library, byte by byte, one document per file", flush=True)
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}  # Megatron warns of each GPU package that is not there
    corpus = [sys.executable, "-m", "megatron_fcp.testing.corpus", str(out / "stdlib")]
    subprocess.run(corpus, check=True, cwd=ROOT, env=quiet)
    flags = training_flags(options, out, pretrained_checkpoint=initial_weights(options, out))
    fcp = ["--context-parallel-backend", "fcp", "--fcp-layout", options.layout]
    plans = out / "plans"
    many = train(
        "cp 4, fcp",
        4,
        [
            *flags,
            *("--context-parallel-size", "4", *fcp),
            *("--fcp-block-size", str(options.block_size), "--fcp-save-plans", str(plans)),
        ],
        out / "cp4.log",
    )
    one = train("cp 1", 1, [*flags, "--context-parallel-size", "1", *fcp], out / "cp1.log")
    files = sorted(plans.glob("*.json.gz"))
    read = [read_plan(path) for path in files]
    reports = [report(p, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype_bytes=DTYPE_BYTES) for p in read]
    print("\n" + loss_table(one, many) + "\n\n" + plan_table(reports, one, many))
    busiest = max(read, key=lambda p: len(p.table.document_length))
    placement_picture(busiest, out / "placement.png")
    print(f"\nPicture of one batch's placement: {out / 'placement.png'}")
    print(f"Done in {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
