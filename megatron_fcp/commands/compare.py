"""``megatron-fcp compare``: FCP against its peers over workloads, scales and clusters; one table, one picture."""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from megatron_fcp.commands.arguments import at_least, naming_flag
from megatron_fcp.commands.output import check_output, naming, note, print_json, print_table, progress
from megatron_fcp.config import check_stream
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.compare import Cell, Sweep, draw, ratios
from megatron_fcp.simulate.hardware import load_hardware
from megatron_fcp.simulate.peers import SYSTEMS, check_systems
from megatron_fcp.simulate.workloads import WORKLOADS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["longtail", "weaktail", "bimodal"])
    parser.add_argument("--scales", nargs="+", type=at_least(1), default=[16, 32, 64, 128, 256], metavar="N")
    parser.add_argument("--hardware", nargs="+", default=["flat5920", "h100-ib"], metavar="NAME|FILE")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME", help=", ".join(SYSTEMS))
    parser.add_argument("--seeds", type=at_least(1), default=1, metavar="K", help="draws per cell; the worst counts")
    parser.add_argument("--tokens-per-rank", type=at_least(1), default=32768, metavar="T")
    parser.add_argument("--picture", metavar="FILE", help="draw efficiency over ranks")
    parser.add_argument("--json", action="store_true", help="print every cell as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Simulate every cell and print."""
    check_systems(arguments.systems)
    check_output("--picture", arguments.picture, picture=True)
    check_stream(max(arguments.scales), arguments.tokens_per_rank, ("--scales", "--tokens-per-rank"))
    for name in arguments.hardware:
        for scale in arguments.scales:
            with naming_flag("--hardware", name):
                Case(np.zeros(0, dtype=np.int64), scale, arguments.tokens_per_rank, load_hardware(name))
    sweep = Sweep(
        arguments.systems, arguments.workloads, sorted(set(arguments.scales)),
        [load_hardware(name) for name in arguments.hardware], range(arguments.seeds), arguments.tokens_per_rank,
    )  # fmt: skip
    note(f"{len(sweep)} simulations, about {max(sweep.estimate(), 1):.0f} s on one core")
    with progress(len(sweep), "simulating") as step:
        cells = sweep.run(step)
    if arguments.picture:
        with naming("--picture", arguments.picture):
            draw(cells, arguments.picture)
    if arguments.json:
        print_json([cell.as_dict() for cell in cells])
    else:
        _print(cells, sweep)
    return 0


def _print(cells: list[Cell], sweep: Sweep) -> None:
    columns = ["cluster, documents, system", *(f"{n} ranks" for n in sweep.scales)]
    rows: list[list[str] | None] = []
    for hardware in sweep.hardware:
        for workload in sweep.workloads:
            rows += [
                [
                    f"{hardware.name} {workload} {system}",
                    *(_cell(cells, system, workload, n, hardware.name) for n in sweep.scales),
                ]
                for system in sweep.systems
            ]
            rows.append(None)
    print_table("efficiency forward / backward", columns, rows)
    if "fcp" in sweep.systems and len(sweep.systems) > 1:
        gains = [
            [system, *(f"{ratios(cells, n)[system]:.2f}x" for n in sweep.scales)]
            for system in sweep.systems
            if system != "fcp"
        ]
        print_table("FCP's least speed-up over each, forward", ["system", *columns[1:]], gains)


def _cell(cells: list[Cell], system: str, workload: str, scale: int, hardware: str) -> str:
    """The median over seeds, and the worst where there are several."""
    chosen = [c for c in cells if (c.system, c.workload, c.cp_size, c.hardware) == (system, workload, scale, hardware)]
    text = f"{statistics.median(c.forward for c in chosen):.3f} / {statistics.median(c.backward for c in chosen):.3f}"
    return text if len(chosen) == 1 else f"{text} (worst {min(c.forward for c in chosen):.3f})"
