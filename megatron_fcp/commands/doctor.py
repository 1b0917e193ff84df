"""``megatron-fcp doctor``: what a launch config asks for, whether it can work, and what it will take."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from typing import Any

from megatron_fcp.commands.arguments import at_least, naming_flag
from megatron_fcp.commands.output import duration, long_work, note, percent, print_json, print_table, progress
from megatron_fcp.commands.scenario import fitting_lengths, price_seconds
from megatron_fcp.launch_config import LaunchConfig, read_launch_config
from megatron_fcp.simulate.forecast import HEADROOM, Forecast, Split, forecast, job_case, splits_that_fit, step_flops
from megatron_fcp.simulate.hardware import PRESETS, load_hardware
from megatron_fcp.simulate.job import Job, assumptions, read_job, why_no_estimate
from megatron_fcp.simulate.tune import Trial, candidates
from megatron_fcp.simulate.workloads import WORKLOADS, draw_lengths

REFUSED = 1
PRINTS = ("flags", "env")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("--config", metavar="FILE", required=True, help="a launch config, as those in configs/")
    documents = parser.add_mutually_exclusive_group()
    documents.add_argument("--workload", choices=WORKLOADS, default="longtail", help="lengths (default: %(default)s)")
    documents.add_argument("--lengths", metavar="FILE", help="document lengths of one micro-batch, one per line")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the drawn lengths (default: %(default)s)")
    parser.add_argument(
        "--hardware", metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)} or a YAML file (default: the config's --fcp-hardware, or h100-ib)",
    )  # fmt: skip
    parser.add_argument("--no-megatron", action="store_true", help="leave Megatron's own checks of the flags out")
    parser.add_argument("--no-tune", action="store_true", help="do not try other block sizes and layouts")
    parser.add_argument(
        "--print", choices=PRINTS, dest="only",
        help="for scripts: only print Megatron's flags, one word per line, or the environment as shell assignments",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="further Megatron flags; they replace the config's")


def run(arguments: argparse.Namespace) -> int:
    """Check, estimate, print."""
    launch = read_launch_config(arguments.config).with_flags(arguments.flags)
    if arguments.only:
        _print_for_scripts(launch, arguments.only)
        return 0
    job, problems = read_job(launch)
    notes: list[str] = []
    if arguments.no_megatron:
        notes.append("Megatron's own checks were left out")
    elif missing := _missing_packages():
        notes.append(f"{missing} is not installed here, so Megatron's own checks of the flags did not run")
    else:
        note("asking Megatron about the flags, about 15 s; --no-megatron leaves that out")
        problems = list(dict.fromkeys([*problems, *_ask_megatron(launch, known=bool(problems))]))
    if launch.flags.get("--context-parallel-backend") != "fcp":
        notes.append("the config does not pass --context-parallel-backend fcp; the figures are those with it")
    result: Forecast | None = None
    splits: list[Split] = []
    if job is not None:
        reason = why_no_estimate(launch)
        notes += [reason] if reason else assumptions(launch, job)
        if reason is None:
            result = _forecast(arguments, job)
            if not result.fits:
                problems.append(_too_large(job, result))
                splits = splits_that_fit(job, result.case)
            elif result.memory.total > HEADROOM * result.case.hardware.memory_bytes:
                notes.append(
                    f"memory is above {HEADROOM:.0%} of the GPU's; CUDA, NCCL and fragmentation are not in the estimate"
                )
    if arguments.json:
        print_json(_as_dict(launch, job, result, problems, notes, splits))
    else:
        _print(launch, job, result, splits)
        for text in notes:
            print(f"note: {text}")
        for text in problems:
            print(f"refused: {text}")
        print(f"{len(problems)} refused" if problems else "ready to launch")
    return REFUSED if problems else 0


def _print_for_scripts(launch: LaunchConfig, what: str) -> None:
    if what == "flags":
        print("\n".join(launch.argv()))
        return
    sizes = {"GPUS": str(launch.gpus), "GPUS_PER_NODE": str(launch.gpus_per_node), "NODES": str(launch.nodes)}
    for name, value in {**sizes, **launch.environment}.items():
        print(f"export {name}={shlex.quote(value)}")


def _missing_packages() -> str | None:
    """A package that Megatron's checks need and that is not here."""
    for name in ("torch", "megatron", "megatron.training"):
        if importlib.util.find_spec(name) is None:
            return {"torch": "PyTorch"}.get(name, "Megatron")
    return None


def _ask_megatron(launch: LaunchConfig, known: bool) -> list[str]:
    """Problems that Megatron's parser and checks, and FCP's refusals, find; in a process of their own.

    Where the division of GPUs is known to be wrong, Megatron's first complaint says the same again and is left out.
    """
    request = {"argv": launch.argv(), "world_size": launch.gpus, "environment": dict(launch.environment)}
    answer = subprocess.run(
        [sys.executable, "-m", "megatron_fcp.integration.preflight"],
        input=json.dumps(request), text=True, capture_output=True, check=False,
    )  # fmt: skip
    try:
        found: list[dict[str, str]] = json.loads(answer.stdout.splitlines()[-1])["problems"]
    except (IndexError, ValueError, TypeError, KeyError):
        last = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        return [f"Megatron's checks could not run: {last}"]
    whose = {"parser": "Megatron's parser: ", "megatron": "Megatron: ", "fcp": ""}
    return [whose[p["by"]] + " ".join(p["text"].split()) for p in found if not (known and p["by"] == "megatron")]


def _forecast(arguments: argparse.Namespace, job: Job) -> Forecast:
    hardware = load_hardware(arguments.hardware or job.hardware or "h100-ib")
    tokens = job.seq_length * job.micro_batch_size
    if arguments.lengths:
        lengths = fitting_lengths(arguments.lengths, tokens, "--seq-length or --micro-batch-size")
    else:
        lengths = draw_lengths(arguments.workload, num_tokens=tokens, seed=arguments.seed)
    with naming_flag("--hardware", arguments.hardware or job.hardware):
        case = job_case(job, lengths, hardware)
    if arguments.no_tune:
        with long_work("planning and pricing", price_seconds(case, 4), 1):
            return forecast(job, case, tuned=False)
    trials = len(candidates(case))
    note(f"{trials} configurations, at most about {max(price_seconds(case, 8) * trials, 1):.0f} s on one core")
    with progress(trials, "trying") as step:
        return forecast(job, case, step=step)


def _too_large(job: Job, result: Forecast) -> str:
    memory, have = result.memory, result.case.hardware.memory_bytes
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    return (
        f"memory: a GPU needs {memory.total / 1e9:.1f} GB, {(memory.total - have) / 1e9:.1f} GB more than the "
        f"{have / 1e9:.0f} GB of {result.case.hardware.name}; split the model or the sequence further"
        + ("" if job.parallel.recompute else f", or pass {recompute}")
    )


def _print(launch: LaunchConfig, job: Job | None, result: Forecast | None, splits: list[Split]) -> None:
    title = f"{launch.path}: {launch.gpus} GPUs on {launch.nodes} node{'s' if launch.nodes > 1 else ''}"
    if job is None:
        note(title)
        return
    print_table(title, ["division", "size", ""], _division(job, result))
    if result is None:
        return
    memory, have = result.memory, result.case.hardware.memory_bytes
    parts = {
        "parameters, bf16": memory.parameters,
        "gradients, fp32": memory.gradients,
        "optimizer states": memory.optimizer,
        "activations" + (", recomputed" if job.parallel.recompute else ""): memory.activations,
        f"FCP: KV of others, busiest rank ({memory.rank})": memory.buffers,
    }
    rows: list[list[str] | None] = [[name, f"{size / 1e9:.2f}", percent(size / have)] for name, size in parts.items()]
    rows += [None, ["sum", f"{memory.total / 1e9:.2f}", percent(memory.total / have)]]
    print_table(f"memory of a GPU with {have / 1e9:.0f} GB ({result.case.hardware.name})", ["", "GB", "share"], rows)
    _print_step(job, result)
    if splits:
        rows = [_split(split) for split in splits]
        columns = ["pipeline x context x data", "recompute", "GB", "bubble"]
        print_table(f"what would fit with tensor-parallel size {job.parallel.tensor}", columns, rows)


def _split(split: Split) -> list[str]:
    p = split.parallel
    sizes, bubble = f"{p.pipeline} x {split.cp_size} x {p.data}", (p.pipeline - 1) / (p.micro_batches + p.pipeline - 1)
    return [sizes, "all" if p.recompute else "none", f"{split.memory.total / 1e9:.1f}", percent(bubble)]


def _division(job: Job, result: Forecast | None) -> list[list[str]]:
    p = job.parallel
    rows = [
        ["tensor", str(p.tensor), f"{job.model.num_heads // p.tensor} heads each"],
        ["pipeline", str(p.pipeline), f"{p.stage_layers(job.model)} layers each"],
        ["context", str(job.cp_size), f"{job.tokens_per_rank:,} of {job.seq_length * job.micro_batch_size:,} tokens"],
        ["data", str(p.data), f"{p.micro_batches} micro-batches of {job.micro_batch_size} per step"],
    ]
    if job.model.experts > 1:
        rows.append(["expert", str(p.expert), f"{job.model.experts // p.expert} of {job.model.experts} experts each"])
    if result is not None:
        nodes = result.case.hardware.ranks_per_node
        rows[2][2] += f", {nodes} rank{'s' if nodes > 1 else ''} per node"
    return rows


def _print_step(job: Job, result: Forecast) -> None:
    case, price = result.case, result.price
    tokens = case.lengths.sum() * job.parallel.micro_batches * job.parallel.data
    flops = step_flops(job, case)

    def row(name: str, seconds: float) -> list[str]:
        rates = f"{tokens / seconds / job.gpus:,.0f}", f"{flops / seconds / job.gpus / 1e12:.0f}"
        return [name, duration(seconds), *rates]

    size = job.config.block_size or result.plan.table.block_size
    rows: list[list[str] | None] = [row(f"as configured: {job.config.layout}, blocks of {size}", price.step)]
    if best := _best(result):
        config, seconds = best.config, best.step_seconds or 0.0
        rows.append(row(f"tuner's best: {config.layout}, blocks of {config.block_size}", seconds))
    longest = int(case.lengths.max(initial=0))
    title = f"predicted step: {case.lengths.size:,} documents, the longest of {longest:,} tokens, in a micro-batch"
    print_table(title, ["", "step", "tokens/s and GPU", "model TFLOP/s and GPU"], rows)
    parts = {
        "attention": price.forward + price.backward - price.reshuffle,
        "the layout's traffic": price.reshuffle,
        "linear layers": price.linear,
        "recomputed attention": price.layer - price.forward - price.backward - price.linear,
    }
    shares = ", ".join(f"{name} {percent(s / price.layer)}" for name, s in parts.items() if s > 1e-9 * price.layer)
    bubble = f"; pipeline bubble {percent(price.bubble)}" if job.parallel.pipeline > 1 else ""
    print(f"a layer: {shares}{bubble}; tensor-, data- and expert-parallel traffic and the optimizer are not priced")


def _best(result: Forecast) -> Trial | None:
    return result.trials[0] if result.trials else None


def _as_dict(
    launch: LaunchConfig, job: Job | None, result: Forecast | None, problems: list[str], notes: list[str],
    splits: list[Split],
) -> dict[str, Any]:  # fmt: skip
    out: dict[str, Any] = {
        "config": launch.path, "gpus": launch.gpus, "nodes": launch.nodes, "refused": problems, "notes": notes,
    }  # fmt: skip
    if job is not None:
        p = job.parallel
        out["division"] = {
            "tensor": p.tensor, "pipeline": p.pipeline, "context": job.cp_size, "data": p.data, "expert": p.expert,
            "micro_batches": p.micro_batches, "tokens_per_rank": job.tokens_per_rank,
        }  # fmt: skip
    if job is not None and result is not None:
        memory, price, best = result.memory, result.price, _best(result)
        out["memory_bytes"] = {**vars(memory), "total": memory.total, "gpu": result.case.hardware.memory_bytes}
        out["step"] = {
            "seconds": price.step, "bubble": price.bubble, "attention_seconds": price.forward + price.backward,
            "linear_seconds": price.linear, "layer_seconds": price.layer, "model_flops": step_flops(job, result.case),
        }  # fmt: skip
        out["tuned"] = None if best is None else best.as_dict()
    if splits:
        out["splits_that_fit"] = [
            {
                "pipeline": s.parallel.pipeline, "context": s.cp_size, "data": s.parallel.data,
                "recompute": s.parallel.recompute, "memory_bytes": s.memory.total,
            }
            for s in splits
        ]  # fmt: skip
    return out
