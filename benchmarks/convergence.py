"""Does training with FCP end where training on one rank ends? 1,000 steps each, three seeds, both layouts.

    python benchmarks/convergence.py                 (resumes: runs that are there already are not repeated)

Every seed draws its own weights and its own order of the samples. Per seed, three runs start from the same weights and
see the same batches: one rank with Megatron's own attention, and four ranks with FCP in either layout. All in fp32,
through ``megatron.training.pretrain`` on the CPU platform, on the quickstart's corpus (Python's standard library, one
document per source file, documents separated in attention). Losses are the loop's own, not those of its log.

Two claims are checked and the exit status is 1 if one fails:

- over the first ``FIRST_STEPS`` steps each loss is within ``TOLERANCE``, relative, of the same seed's on one rank;
- at every step, the smoothed loss (mean of the last ``WINDOW`` steps) differs from the same seed's on one rank by less
  than the seeds' smoothed losses on one rank spread (highest minus lowest).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fcp.commands.output import print_table, progress
from megatron_fcp.testing.loop import TINY_MODEL, TINY_RUN, TrainingJob, TrainingLoop, to_argv

FIRST_STEPS, TOLERANCE = 100, 1e-4
WINDOW = 50
BASELINE = "cp 1"
RUNS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {},
    **{
        f"cp 4, {layout}": {
            "context_parallel_size": 4,
            "context_parallel_backend": "fcp",
            "fcp_layout": layout,
            "fcp_block_size": 64,
        }
        for layout in ("reshuffle", "resident")
    },
}
MODEL: Mapping[str, Any] = {
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "kv_channels": 32,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
}
DATA: Mapping[str, Any] = {
    "mock_data": None,
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
    "micro_batch_size": 2,
    "global_batch_size": 2,
    "distributed_timeout_minutes": 60,  # on a crowded machine
}
EVERYTHING = 10**9  # tokens: the whole standard library
Losses = dict[tuple[int, str], np.ndarray]


def flags_of(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Megatron's flags of one run, but for paths."""
    return {**TINY_MODEL, **TINY_RUN, **MODEL, **DATA, "seed": seed, "train_iters": steps, **RUNS[name]}


def run_file(out: Path, name: str, flags: Mapping[str, Any]) -> Path:
    """Where a run's losses are kept: other flags, another file."""
    key = hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:12]
    return out / f"{name.replace(', ', '-').replace(' ', '')}-seed{flags['seed']}-{key}.json"


def train_all(out: Path, seeds: list[int], steps: int, hours: float) -> Losses:
    """Losses of every run, from the files of `out` or from training, one run after the other."""
    losses: Losses = {}
    with TrainingLoop(out / "start") as loop, progress(len(seeds) * len(RUNS), "training") as step:
        for seed in seeds:
            for name in RUNS:
                flags = flags_of(name, seed, steps)
                path = run_file(out, name, flags)
                if not path.is_file():
                    step(f"{name}, seed {seed}", 0)
                    flags["data_path"] = loop.corpus(paragraphs=False, max_tokens=EVERYTHING).prefix
                    flags["pretrained_checkpoint"] = loop.initial_checkpoint(**MODEL, seed=seed)
                    began = time.monotonic()
                    result = loop.run(TrainingJob(to_argv(flags), _ranks(flags), timeout=3600 * hours))
                    content = {"seconds": round(time.monotonic() - began, 1), "losses": result.losses}
                    draft = path.with_suffix(".part")
                    draft.write_text(json.dumps(content), encoding="utf-8")
                    draft.replace(path)
                losses[seed, name] = np.array(json.loads(path.read_text(encoding="utf-8"))["losses"])
                step(f"{name}, seed {seed}")
    return losses


def _ranks(flags: Mapping[str, Any]) -> int:
    return int(flags.get("context_parallel_size", 1))


def smoothed(losses: np.ndarray) -> np.ndarray:
    """Mean of the last ``WINDOW`` steps, of as many as there are at first; shape [steps]."""
    total = np.concatenate([[0.0], np.cumsum(losses)])
    stop = np.arange(1, losses.size + 1)
    start = np.maximum(stop - WINDOW, 0)
    return (total[stop] - total[start]) / (stop - start)


def spread(losses: Losses, seeds: list[int]) -> np.ndarray:
    """Highest minus lowest smoothed loss of the seeds on one rank, shape [steps]."""
    return np.ptp([smoothed(losses[seed, BASELINE]) for seed in seeds], axis=0)


def figures(losses: Losses, seeds: list[int]) -> list[dict[str, Any]]:
    """Per layout and seed, the numbers behind both claims."""
    between_seeds = spread(losses, seeds)
    rows = []
    for name in RUNS:
        if name == BASELINE:
            continue
        for seed in seeds:
            run, one = losses[seed, name], losses[seed, BASELINE]
            relative = np.abs(run - one) / one
            difference = np.abs(smoothed(run) - smoothed(one))
            share = difference / between_seeds
            rows.append(
                {
                    "run": name,
                    "seed": seed,
                    "first_steps_relative": float(relative[:FIRST_STEPS].max()),
                    "all_steps_relative": float(relative.max()),
                    "smoothed_difference": float(difference.max()),
                    "share_of_spread": float(share.max()),
                    "final_loss": float(smoothed(run)[-1]),
                    "final_loss_one_rank": float(smoothed(one)[-1]),
                }
            )
    return rows


def holds(row: Mapping[str, Any]) -> bool:
    """Whether both claims hold for one row of :func:`figures`."""
    return bool(row["first_steps_relative"] < TOLERANCE and row["share_of_spread"] < 1)


def draw(losses: Losses, seeds: list[int], path: Path) -> None:
    """Write the picture: all curves over each other, and their differences beside the spread of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 8.5), sharex=True, height_ratios=(3, 2))
    steps = np.arange(1, losses[seeds[0], BASELINE].size + 1)
    styles = {BASELINE: ("-", 5.0, 0.25), "cp 4, reshuffle": ("-", 1.2, 1.0), "cp 4, resident": (":", 2.0, 1.0)}
    for i, seed in enumerate(seeds):
        for name, (line, width, alpha) in styles.items():
            curve = smoothed(losses[seed, name])
            label = f"{name}, seed {seed}"
            top.plot(steps, curve, line, color=f"C{i}", linewidth=width, alpha=alpha, label=label)
    top.set_ylabel(f"loss, mean of the last {WINDOW} steps")
    top.set_title("Python's standard library, byte by byte: every run of a seed lies on the same curve")
    top.legend(fontsize=8, ncols=len(seeds))
    bottom.plot(steps, spread(losses, seeds), color="black", linewidth=2, label="spread of the seeds on one rank")
    for name, (line, _, _) in styles.items():
        if name == BASELINE:
            continue
        for i, seed in enumerate(seeds):
            gap = np.abs(smoothed(losses[seed, name]) - smoothed(losses[seed, BASELINE]))
            label = f"{name} against {BASELINE}, seed {seed}"
            bottom.plot(steps, np.maximum(gap, 1e-8), line, color=f"C{i}", linewidth=1, label=label)
    bottom.set_yscale("log")
    bottom.set_ylabel("difference of smoothed losses")
    bottom.set_xlabel("step")
    bottom.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Train what is missing, print the figures, write them and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("convergence"), help="folder for runs, figures and picture")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--hours", type=float, default=2.0, help="time-out of one run (default: %(default)s)")
    options = parser.parse_args()
    if options.steps <= FIRST_STEPS or len(set(options.seeds)) < 2:
        parser.error(f"--steps must be more than {FIRST_STEPS}, and --seeds at least two different ones")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    losses = train_all(out, options.seeds, options.steps, options.hours)
    rows = figures(losses, options.seeds)
    least = float(spread(losses, options.seeds).min())
    columns = ["run", "seed", f"first {FIRST_STEPS} steps", "all steps", "smoothed", "of the spread", "last", "cp 1"]
    print_table(
        f"against one rank: relative, relative, absolute, share; least spread of the seeds {least:.4f}",
        columns,
        [
            [
                *(row["run"], str(row["seed"]), f"{row['first_steps_relative']:.1e}"),
                *(f"{row['all_steps_relative']:.1e}", f"{row['smoothed_difference']:.1e}"),
                *(f"{row['share_of_spread']:.4f}", f"{row['final_loss']:.4f}", f"{row['final_loss_one_rank']:.4f}"),
            ]
            for row in rows
        ],
    )
    (out / "figures.json").write_text(json.dumps({"rows": rows, "least_spread": least}, indent=1), encoding="utf-8")
    draw(losses, options.seeds, out / "convergence.png")
    failed = [row for row in rows if not holds(row)]
    print(f"{len(rows) - len(failed)} of {len(rows)} runs hold both claims; picture: {out / 'convergence.png'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
