"""``megatron-fcp tune``: the best block size, layout and head groups for given documents, as a config file."""

from __future__ import annotations

import argparse
import shlex
import time
from typing import get_args

from megatron_fcp.commands.arguments import own_flags
from megatron_fcp.commands.output import (
    check_output,
    duration,
    long_work,
    naming,
    note,
    percent,
    print_json,
    print_table,
    progress,
)
from megatron_fcp.commands.scenario import (
    add_layer_arguments,
    add_model_arguments,
    add_scale_arguments,
    scenario_from,
)
from megatron_fcp.config import HEAD_GROUPS, FcpConfig, Layout
from megatron_fcp.config_file import write_config
from megatron_fcp.simulate.tune import Trial, candidates, draw_curve, tune

SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    add_scale_arguments(parser)
    add_model_arguments(parser)
    add_layer_arguments(parser)
    parser.add_argument("--layout", choices=get_args(Layout), help="consider this layout only")
    parser.add_argument("--output", metavar="FILE", help="write the winner as a config file (fcp-config/1)")
    parser.add_argument("--picture", metavar="FILE", help="draw efficiency and traffic against block size")
    parser.add_argument("--json", action="store_true", help="print all trials as JSON, the best first")


def run(arguments: argparse.Namespace) -> int:
    """Try the candidates, print them and write the best."""
    check_output("--output", arguments.output)
    check_output("--picture", arguments.picture, picture=True)
    scenario = scenario_from(arguments)
    if scenario.plan is not None:
        raise ValueError(f"--plan {arguments.plan} holds decisions already; tune takes --lengths or --workload")
    layouts: tuple[Layout, ...] = (arguments.layout,) if arguments.layout else get_args(Layout)
    configs = candidates(scenario.case, layouts)
    with own_flags():
        with long_work("trying the first configuration", scenario.seconds(), 1):
            start = time.perf_counter()
            tune([scenario.case], configs[:1], model=scenario.model, parallel=scenario.parallel)
            once = time.perf_counter() - start
        note(f"{len(configs)} configurations, at most about {max(once * len(configs), 1):.0f} s")
        with progress(len(configs), "trying") as step:
            trials = tune([scenario.case], configs, model=scenario.model, parallel=scenario.parallel, step=step)
    best = trials[0]
    if arguments.output:
        with naming("--output", arguments.output):
            write_config(arguments.output, best.config, scenario.case.forward, _comment(best, arguments.hardware))
    if arguments.picture:
        with naming("--picture", arguments.picture):
            draw_curve(trials, arguments.picture)
    if arguments.json:
        print_json([t.as_dict() for t in trials])
    else:
        _print(trials)
        print("flags: " + shlex.join(flags(best.config, arguments.hardware, arguments.output)))
    return 0


def flags(config: FcpConfig, hardware: str, path: str | None) -> list[str]:
    """The training command's flags for ``config``, which is in file ``path`` if that was asked for."""
    if path:
        return ["--context-parallel-backend", "fcp", "--fcp-config", path]
    out = ["--context-parallel-backend", "fcp", "--fcp-hardware", hardware, "--fcp-layout", config.layout]
    if config.head_groups != HEAD_GROUPS:
        out += ["--fcp-head-groups", str(config.head_groups)]
    return [*out, "--fcp-block-size", str(config.block_size)]


def _comment(best: Trial, hardware: str) -> str:
    return (
        f"written by megatron-fcp tune for {hardware}\n"
        f"simulated attention: {duration(best.seconds)} per layer, forward {percent(best.forward)}, "
        f"backward {percent(best.backward)} of the kernels' speed"
    )


def _print(trials: list[Trial]) -> None:
    whole = trials[0].step_seconds is not None
    rows = [
        [
            str(t.config.block_size), t.config.layout,
            str(t.config.head_groups) if t.config.layout == "reshuffle" else "", percent(t.forward),
            percent(t.backward), f"{t.received_bytes / 1e6:.0f}", str(t.rounds), str(t.stages), duration(t.seconds),
            *([duration(t.step_seconds or 0)] if whole else []),
        ]
        for t in trials[:SHOWN]
    ]  # fmt: skip
    columns = ["block", "layout", "head groups", "forward", "backward", "MB received", "rounds", "stages", "attention"]
    print_table(f"best {len(rows)} of {len(trials)}", [*columns, *(["step"] if whole else [])], rows)
