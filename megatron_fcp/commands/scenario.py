"""Arguments that the instruments share: which documents, on which ranks, of which cluster, with which model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fcp.commands.arguments import at_least, file_plan, naming_flag, own_flags, read_lengths
from megatron_fcp.config import FcpConfig, check_stream
from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.plan import Plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import PRESETS, AttentionShape, HardwareModel, load_hardware
from megatron_fcp.simulate.models import MODELS, ModelShape, Parallel, find_model, parse_skip_freq
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.workloads import WORKLOADS, draw_lengths

CP_SIZE, TOKENS_PER_RANK = 64, 32768


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
    parser.add_argument("--cp-size", type=at_least(1), metavar="N", help=f"ranks (default: {CP_SIZE})")
    parser.add_argument(
        "--window", type=at_least(0), metavar="W",
        help="tokens before a query that it attends to at most, as in --window-size W,0 (default: all of its document, "
        "or what the plan file says)",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", default="h100-ib", metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)} or a YAML file from `megatron-fcp profile` (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens-per-rank", type=at_least(1), metavar="T", help=f"of the stream (default: {TOKENS_PER_RANK})"
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


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which layers of a model have the window."""
    parser.add_argument(
        "--window-attn-skip-freq", type=skip_pattern, metavar="N|PATTERN",
        help="with --model and --window: every N-th layer sees whole documents, or 1 (windowed) or 0 for each layer, "
        "such as [1,1,0]*10; tokens are placed for those with 0 (default: all layers have the window)",
    )  # fmt: skip


def skip_pattern(text: str) -> int | tuple[int, ...]:
    """An argparse type: ``--window-attn-skip-freq`` as Megatron reads it, a number or a list expression."""
    try:
        return parse_skip_freq(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
        if self.plan is not None:
            return self.plan
        with own_flags():
            return fcp_plan(self.case, config)

    def seconds(self, passes: int = 2) -> float:
        """Roughly what planning and simulating so many passes takes on one core, compiled."""
        return price_seconds(self.case, passes)


def price_seconds(case: Case, passes: int) -> float:
    """Roughly what planning a case and simulating so many passes takes on one core, compiled."""
    seconds = (case.cp_size * case.tokens_per_rank / 2**25) ** 1.2 * 2.5 * (1 + passes)
    return seconds if case.window is None else seconds + 0.02 * case.cp_size


def scenario_from(args: argparse.Namespace) -> Scenario:
    """The scenario that the arguments describe.

    Raises
    ------
    ValueError
        For files that are missing or hold something else, and for numbers outside their range.
    """
    sizes = {"--cp-size": args.cp_size, "--tokens-per-rank": args.tokens_per_rank}
    given = [flag for flag, value in sizes.items() if value]
    if args.plan and given:
        raise ValueError(f"--plan brings its own stream; leave out {', '.join(given)}")
    plan = file_plan(args.plan) if args.plan else None
    model = find_model(args.model) if getattr(args, "model", None) else None
    model, window = _windows(args, model, plan)
    parallel = parallel_from(args) if hasattr(args, "tensor") else Parallel()
    shape = parallel.attention(model) if model else AttentionShape()
    hardware = on_nodes(load_hardware(args.hardware), parallel)
    cp_size, tokens = args.cp_size or CP_SIZE, args.tokens_per_rank or TOKENS_PER_RANK
    if plan:
        cp_size, tokens = plan.cp_size, plan.tokens_per_rank
    check_stream(cp_size, tokens, ("--cp-size", "--tokens-per-rank"))
    if plan:
        lengths: IntArray = plan.table.document_length
    elif args.lengths:
        lengths = fitting_lengths(args.lengths, cp_size * tokens)
    else:
        lengths = draw_lengths(args.workload, num_tokens=cp_size * tokens, seed=args.seed)
    speeds = read_numbers(args.speeds, "--speeds") if getattr(args, "speeds", None) else None
    source = "--speeds" if speeds is not None else "--hardware"
    with naming_flag(source, args.speeds if speeds is not None else args.hardware):
        return Scenario(Case(lengths, cp_size, tokens, hardware, shape, speeds, window), plan, model, parallel)


def _windows(
    args: argparse.Namespace, model: ModelShape | None, plan: Plan | None
) -> tuple[ModelShape | None, int | None]:
    """The model with its windows, and the window of the layers that tokens are placed for."""
    skip, window = getattr(args, "window_attn_skip_freq", None), args.window
    if skip is not None and (model is None or window is None):
        raise ValueError("--window-attn-skip-freq says which layers of a --model have the --window; pass both")
    if plan is not None and window is not None and skip is None and window != plan.table.window:
        planned = "whole documents" if plan.table.window is None else f"a window of {plan.table.window}"
        raise ValueError(
            f"--window {window}: the plan of --plan {args.plan} is for {planned}; leave out --window, or plan again "
            "with `megatron-fcp plan --window`"
        )
    if plan is not None and window is None:
        window = plan.table.window
    if model is None:
        return None, window
    model = dataclasses.replace(model, window=window, window_skip_freq=skip)
    placed = next(iter(model.layers_by_window))
    if plan is not None and plan.table.window != placed:
        raise ValueError(
            f"--plan {args.plan} is for a window of {plan.table.window}, but some layers see whole documents, and "
            "tokens are placed for those; plan again without --window"
        )
    return model, placed


def fitting_lengths(source: str, room: int, remedy: str = "--cp-size or --tokens-per-rank") -> IntArray:
    """Lengths from a file that fill at most ``room`` tokens.

    Raises
    ------
    ValueError
        Naming ``--lengths`` and by how much they are too long.
    """
    lengths = read_lengths(source)
    if (total := sum(lengths)) > room:
        raise ValueError(
            f"--lengths {source}: the documents hold {total} tokens but the ranks have room for {room}, {total - room} "
            f"too few; raise {remedy}, or pass fewer documents"
        )
    return np.array(lengths, dtype=np.int64)


def on_nodes(hardware: HardwareModel, parallel: Parallel) -> HardwareModel:
    """Context-parallel ranks that share a node, once tensor-parallel ranks have taken their place in it."""
    return dataclasses.replace(hardware, ranks_per_node=max(hardware.ranks_per_node // parallel.tensor, 1))


def read_numbers(path: str, flag: str) -> FloatArray:
    """Numbers from a file: a JSON list, or one per line."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{flag} {path}: no such file")
    try:
        text = file.read_text(encoding="utf-8").strip()
        values = json.loads(text) if text.startswith("[") else [float(line) for line in text.split()]
        if not values:
            raise ValueError("it is empty")
        return np.array(values, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{flag} {path}: expected one number per line or a JSON list ({error})") from None
