"""``megatron-fcp replay``: a cluster's kernels on one device, with a modelled network between them.

::

    plan file -> each chosen rank's stages, real shapes, timed here --+--> makespan, TFLOP/s per rank, against the
                 network of --hardware, simulated --------------------+    simulator's own prediction
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_fcp.commands.arguments import at_least, check_heads, file_plan, naming_flag
from megatron_fcp.commands.output import (
    check_output,
    duration,
    naming,
    note,
    percent,
    print_json,
    print_table,
    progress,
)
from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.blocks import windowed_pairs
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.work import StageWork
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import PRESETS, AttentionShape, HardwareModel, load_hardware
from megatron_fcp.simulate.kernel_fit import KernelFit, fit_kernel
from megatron_fcp.simulate.kernels import BACKWARD_FLOPS
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.program import COMPUTE, Program, Timeline

if TYPE_CHECKING:
    from megatron_fcp.runtime.replay import StageSeconds

DTYPES = ("bfloat16", "float16", "float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("--plan", required=True, metavar="FILE", help="a plan written by `megatron-fcp plan --out`")
    parser.add_argument(
        "--ranks", default="worst:4", metavar="all|worst:K|R,R,...",
        help="ranks to run: all, the K with the heaviest predicted kernels, or a list (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", default="h100-ib", metavar="NAME|FILE",
        help=f"network between the ranks, and the prediction to compare with: {', '.join(PRESETS)} or a YAML file "
        "(default: %(default)s)",
    )  # fmt: skip
    shape = parser.add_argument_group("attention of one rank")
    shape.add_argument("--num-heads", type=at_least(1), default=64, help="default: %(default)s")
    shape.add_argument("--num-kv-heads", type=at_least(1), default=8, help="default: %(default)s")
    shape.add_argument("--head-dim", type=at_least(1), default=128, help="default: %(default)s")
    shape.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    shape.add_argument("--kernel", default="auto", help="attention kernel, as for --fcp-kernel (default: %(default)s)")
    parser.add_argument("--device", help="torch device (default: cuda where there is one, else cpu)")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="timed runs; the median counts (default: 3)")
    parser.add_argument("--forward-only", action="store_true", help="leave the backward pass out")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="the device's peak, to print MFU against")
    parser.add_argument(
        "--save-hardware", metavar="FILE", help="write --hardware with the measured kernel speed, as YAML"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Replay and print."""
    check_output("--save-hardware", arguments.save_hardware)
    if arguments.peak_tflops is not None and not 0 < arguments.peak_tflops < np.inf:
        raise ValueError(f"--peak-tflops must be a positive number, got {arguments.peak_tflops}")
    check_heads(arguments.num_heads, arguments.num_kv_heads)
    plan = file_plan(arguments.plan)
    hardware = load_hardware(arguments.hardware)
    shape = AttentionShape(arguments.num_heads, arguments.num_kv_heads, arguments.head_dim)
    with naming_flag("--hardware", arguments.hardware):
        case = Case(
            plan.table.document_length, plan.cp_size, plan.tokens_per_rank, hardware, shape, window=plan.table.window
        )
    passes = [False] if arguments.forward_only else [False, True]
    programs = [plan_program(plan, case, backward=b, wait_for_room=True) for b in passes]
    ranks = choose_ranks(arguments.ranks, programs[0].run().compute)
    measured, how = _measure(plan, ranks, arguments)
    results = [combine(plan, case, program, measured, backward=b) for program, b in zip(programs, passes)]
    fits = [fit_pass(plan, measured, backward=b) for b in passes]
    figures = _figures(plan, arguments, ranks, how, results, fits)
    if arguments.save_hardware:
        with naming("--save-hardware", arguments.save_hardware):
            save_hardware(arguments.save_hardware, hardware, shape, fits, how)
        note(f"measured kernel speed written to {arguments.save_hardware}")
    if arguments.json:
        print_json(figures)
    else:
        _print(figures)
    return 0


def choose_ranks(text: str, compute: FloatArray) -> list[int]:
    """Ranks that ``--ranks`` names, ascending.

    Parameters
    ----------
    text : str
    compute : FloatArray, shape [cp_size]
        Predicted kernel seconds.

    Raises
    ------
    ValueError
        If it names none, or one that the plan does not have.
    """
    cp_size = compute.size
    if text == "all":
        return list(range(cp_size))
    kind, _, count = text.partition(":")
    if kind == "worst" and count.isdecimal() and int(count) > 0:
        return sorted(np.argsort(-compute, kind="stable")[: int(count)].tolist())
    parts = text.split(",")
    if all(part.isdecimal() for part in parts):
        ranks = sorted({int(part) for part in parts})
        if ranks[-1] < cp_size:
            return ranks
        raise ValueError(f"--ranks {text}: the plan has ranks 0 to {cp_size - 1}")
    raise ValueError(f"--ranks {text!r}: give all, worst:K with K of at least 1, or ranks such as 0,3,7")


def _measure(plan: Plan, ranks: Sequence[int], args: argparse.Namespace) -> tuple[list[StageSeconds], dict[str, str]]:
    """Times of the chosen ranks, and how they were taken."""
    import torch

    from megatron_fcp.runtime.kernels import select_kernel
    from megatron_fcp.runtime.replay import ReplayShape, replay_rank

    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    dtype = getattr(torch, args.dtype)
    heads = {"num_heads": args.num_heads, "num_kv_heads": args.num_kv_heads}
    dims = {"head_dim_qk": args.head_dim, "head_dim_v": args.head_dim}
    try:
        kernel, reason = select_kernel(args.kernel, device=device, dtype=dtype, **heads, **dims)
    except ValueError as error:
        raise ValueError(str(error).replace("--fcp-kernel", "--kernel")) from error
    note(reason)
    shape = ReplayShape(args.num_heads, args.num_kv_heads, args.head_dim, args.head_dim, dtype)
    times: list[StageSeconds] = []
    with progress(len(ranks), "replay") as step:
        for rank in ranks:
            start = time.perf_counter()
            rank_plan = plan.rank_plan(rank)
            backward = not args.forward_only
            times.append(replay_rank(rank_plan, shape, kernel, device, backward=backward, repeats=args.repeats))
            if rank == ranks[0] and len(ranks) > 1:
                note(f"{len(ranks)} ranks, about {(time.perf_counter() - start) * len(ranks):.0f} s")
            step(f"rank {rank}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    how = {"device": name, "kernel": kernel.name, "dtype": args.dtype, "torch": torch.__version__}
    return times, how | {"date": datetime.now(UTC).date().isoformat()}


@dataclass(frozen=True)
class PassResult:
    """A pass with measured kernels in a modelled network, beside the simulator's own.

    Attributes
    ----------
    measured, predicted : Timeline
    ratio : FloatArray, shape [num_measured]
        Measured over predicted kernel seconds of each rank that was run.
    flops : float
        Of the whole attention, as one causal kernel per document.
    ideal_s : float
        Seconds of a perfect cluster by the cost model.
    """

    measured: Timeline
    predicted: Timeline
    ratio: FloatArray
    flops: float
    ideal_s: float

    def tflops(self, timeline: Timeline) -> float:
        """TFLOP/s of one rank, over the makespan."""
        return self.flops / timeline.program.num_ranks / timeline.makespan / 1e12 if timeline.makespan else 0.0


def combine(
    plan: Plan, case: Case, program: Program, measured: Sequence[StageSeconds], *, backward: bool
) -> PassResult:
    """Put measured seconds into the program; ranks that were not run take the median ratio of those that were.

    A stage that the program cuts into several calls shares its measured seconds out as the prediction does.
    """
    predicted = program.run()
    seconds = program.seconds.copy()
    calls = program.kind == COMPUTE
    ratios: list[float] = []
    done = np.zeros(plan.cp_size, dtype=bool)
    for times in measured:
        mine: IntArray = np.flatnonzero(calls & (program.src == times.rank))
        taken = times.backward if backward else times.forward
        before = np.zeros(taken.size)
        np.add.at(before, program.stage[mine], program.seconds[mine])
        if before.any():
            ratios.append(float(taken.sum() / before.sum()))
        factor = np.divide(taken, before, out=np.ones(taken.size), where=before > 0)
        seconds[mine] *= factor[program.stage[mine]]
        done[times.rank] = True
    others = calls & ~done[program.src]
    seconds[others] *= float(np.median(ratios)) if ratios else 1.0
    pairs = float(windowed_pairs(plan.table.document_length, plan.table.window).sum())
    flops = pairs * case.shape.flops_per_pair * (BACKWARD_FLOPS if backward else 1)
    replayed = dataclasses.replace(program, seconds=seconds).run()
    return PassResult(replayed, predicted, np.array(ratios), flops, case.ideal(backward=backward))


def fit_pass(plan: Plan, measured: Sequence[StageSeconds], *, backward: bool) -> KernelFit | None:
    """The cost model of the measured stages; None if they hold no work."""
    works: list[tuple[StageWork, ...]] = []
    seconds: list[float] = []
    for times in measured:
        for calls, taken in zip(plan.rank_plan(times.rank).calls, times.backward if backward else times.forward):
            work = tuple(call for call in calls if call.num_items)
            if work and taken > 0:
                works.append(work)
                seconds.append(float(taken))
    return fit_kernel(works, np.array(seconds)) if works else None


def save_hardware(
    path: str, base: HardwareModel, shape: AttentionShape, fits: Sequence[KernelFit | None], how: dict[str, str]
) -> None:
    """Write ``base`` with the measured kernel speed; the file's first lines say what was measured.

    Raises
    ------
    ValueError
        If nothing was measured.
    """
    forward = fits[0]
    if forward is None:
        raise ValueError("--save-hardware: the chosen ranks have no work, so no speed was measured")
    kernel_flops = shape.flops_per_pair / forward.pair_s / (1 - base.comm_sms / base.sms)
    backward_rate = base.backward_rate
    if len(fits) > 1 and fits[1] is not None:
        backward_rate = forward.pair_s * BACKWARD_FLOPS / fits[1].pair_s
    model = dataclasses.replace(
        base,
        name=f"{base.name}-replayed",
        kernel_flops=kernel_flops,
        backward_rate=backward_rate,
        q_half=forward.q_half,
        kv_half=forward.kv_half,
    )
    header = "".join(f"{key}: {value}\n" for key, value in how.items())
    rest = "kernel_flops, backward_rate, q_half and kv_half are measured, the rest is that of " + base.name
    model.to_yaml(path, f"{header}{rest}; fit error {percent(forward.error)}")


def _figures(
    plan: Plan,
    args: argparse.Namespace,
    ranks: Sequence[int],
    how: dict[str, str],
    results: Sequence[PassResult],
    fits: Sequence[KernelFit | None],
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "plan": plan.digest, "cp_size": plan.cp_size, "tokens_per_rank": plan.tokens_per_rank,
        "hardware": args.hardware, "ranks": list(ranks), "measured_with": how,
    }  # fmt: skip
    for name, result, fit in zip(("forward", "backward"), results, fits):
        measured, predicted = result.measured, result.predicted
        figures[name] = {
            "makespan_s": {"measured": measured.makespan, "predicted": predicted.makespan},
            "kernel_s_max": {"measured": float(measured.compute.max()), "predicted": float(predicted.compute.max())},
            "kernel_imbalance": {"measured": measured.imbalance, "predicted": predicted.imbalance},
            "waiting_share": {
                "measured": _waiting(measured), "predicted": _waiting(predicted),
            },
            "tflops_per_rank": {"measured": result.tflops(measured), "predicted": result.tflops(predicted)},
            "measured_over_predicted": {
                "lowest": float(result.ratio.min(initial=np.inf)) if result.ratio.size else None,
                "median": float(np.median(result.ratio)) if result.ratio.size else None,
                "highest": float(result.ratio.max(initial=0.0)) if result.ratio.size else None,
            },
            "fit": dataclasses.asdict(fit) if fit else None,
        }  # fmt: skip
        if args.peak_tflops:
            figures[name]["mfu"] = {
                side: result.tflops(t) / args.peak_tflops
                for side, t in (("measured", measured), ("predicted", predicted))
            }
    return figures


def _waiting(timeline: Timeline) -> float:
    """Share of the makespan in which the mean rank runs no kernel."""
    return 1 - float(timeline.compute.mean()) / timeline.makespan if timeline.makespan else 0.0


def _print(f: dict[str, Any]) -> None:
    how = f["measured_with"]
    title = (
        f"{len(f['ranks'])} of {f['cp_size']} ranks replayed on {how['device']} ({how['kernel']}, {how['dtype']}), "
        f"network of {f['hardware']}; the others by the median ratio"
    )
    names = [name for name in ("forward", "backward") if name in f]
    columns = [f"{name}, {side}" for name in names for side in ("measured", "predicted")]
    rows: list[list[str]] = []
    for label, key, show in (
        ("makespan of one attention", "makespan_s", duration),
        ("kernel time of the heaviest rank", "kernel_s_max", duration),
        ("kernel time, max / mean", "kernel_imbalance", "{:.3f}".format),
        ("mean rank without a kernel", "waiting_share", percent),
        ("TFLOP/s per rank", "tflops_per_rank", "{:.4g}".format),
        ("MFU", "mfu", percent),
    ):
        if key in f[names[0]]:
            rows.append([label, *(show(f[name][key][side]) for name in names for side in ("measured", "predicted"))])
    print_table(title, ["", *columns], rows)
    for name in names:
        ratio, fit = f[name]["measured_over_predicted"], f[name]["fit"]
        if fit is not None:
            half = f"half lengths q {fit['q_half']:.0f}, kv {fit['kv_half']:.0f} and {duration(fit['call_s'])} per call"
            print(
                f"{name}: measured / predicted kernel seconds of a rank: {ratio['lowest']:.3g} to "
                f"{ratio['highest']:.3g}, median {ratio['median']:.3g}; {half} (error {percent(fit['error'])})"
            )
