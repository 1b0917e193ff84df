"""Arguments that the instruments share: which documents, on which ranks, of which cluster, with which model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fcp.commands.arguments import at_least, read_lengths
from megatron_fcp.config import FcpConfig
from megatron_fcp.plan.arrays import FloatArray
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.planfile import read_plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import PRESETS, AttentionShape, HardwareModel, load_hardware
from megatron_fcp.simulate.models import MODELS, ModelShape, Parallel, find_model
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.workloads import WORKLOADS, draw_lengths


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a single case needs."""
    documents = parser.add_mutually_exclusive_group()
    documents.add_argument(
        "--workload", choices=WORKLOADS, default="longtail", help="drawn lengths (default: %(default)s)"
    )
    documents.add_argument(
        "--lengths", metavar="FILE", help="document lengths: one per line, or a JSON list; '-' reads standard input"
    )
    documents.add_argument("--plan", metavar="FILE", help="a plan written by `megatron-fcp plan --out`")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--cp-size", type=at_least(1), default=64, metavar="N", help="ranks (default: %(default)s)")
    add_cluster_arguments(parser)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add hardware and tokens per rank."""
    parser.add_argument(
        "--hardware", default="h100-ib", metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)} or a YAML file from `megatron-fcp profile` (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens-per-rank", type=at_least(1), default=32768, metavar="T", help="of the stream (default: %(default)s)"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add model, its split and rank speeds."""
    parser.add_argument(
        "--model", choices=tuple(MODELS), help="price whole steps of this model (default: Llama-3-70B's attention only)"
    )
    for name, what in (
        ("tensor", "tensor-parallel size"),
        ("pipeline", "pipeline-parallel size"),
        ("expert", "expert-parallel size"),
        ("data", "data-parallel replicas"),
        ("micro-batches", "micro-batches per step"),
    ):
        parser.add_argument(
            f"--{name}", type=at_least(1), default=1, metavar="N", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument("--recompute", action="store_true", help="recompute whole layers in backward")
    parser.add_argument(
        "--speeds", metavar="FILE", help="compute speed of each rank relative to the others: one per line, or JSON"
    )


def parallel_from(args: argparse.Namespace) -> Parallel:
    """How the model is split."""
    return Parallel(args.tensor, args.pipeline, args.expert, args.data, args.micro_batches, args.recompute)


@dataclass(frozen=True)
class Scenario:
    """What the arguments describe."""

    case: Case
    plan: Plan | None  # given with --plan
    model: ModelShape | None
    parallel: Parallel

    def plan_with(self, config: FcpConfig | None = None) -> Plan:
        """The given plan, or the planner's."""
        return self.plan or fcp_plan(self.case, config)


def scenario_from(args: argparse.Namespace) -> Scenario:
    """The scenario that the arguments describe.

    Raises
    ------
    ValueError
        For files that are missing or hold something else, and for numbers outside their range.
    """
    model = find_model(args.model) if getattr(args, "model", None) else None
    parallel = parallel_from(args) if hasattr(args, "tensor") else Parallel()
    shape = parallel.attention(model) if model else AttentionShape()
    hardware = on_nodes(load_hardware(args.hardware), parallel)
    plan = read_plan(args.plan) if args.plan else None
    cp_size, tokens = (plan.cp_size, plan.tokens_per_rank) if plan else (args.cp_size, args.tokens_per_rank)
    if plan:
        lengths = plan.table.document_length
    elif args.lengths:
        lengths = np.array(read_lengths(args.lengths), dtype=np.int64)
    else:
        lengths = draw_lengths(args.workload, num_tokens=cp_size * tokens, seed=args.seed)
    speeds = read_numbers(args.speeds, "--speeds") if getattr(args, "speeds", None) else None
    return Scenario(Case(lengths, cp_size, tokens, hardware, shape, speeds), plan, model, parallel)


def on_nodes(hardware: HardwareModel, parallel: Parallel) -> HardwareModel:
    """Context-parallel ranks that share a node, once tensor-parallel ranks have taken their place in it."""
    return dataclasses.replace(hardware, ranks_per_node=max(hardware.ranks_per_node // parallel.tensor, 1))


def read_numbers(path: str, flag: str) -> FloatArray:
    """Numbers from a file: a JSON list, or one per line."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{flag} {path}: no such file")
    text = file.read_text(encoding="utf-8").strip()
    try:
        values = json.loads(text) if text.startswith("[") else [float(line) for line in text.split()]
        return np.array(values, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{flag} {path}: expected one number per line or a JSON list ({error})") from None
