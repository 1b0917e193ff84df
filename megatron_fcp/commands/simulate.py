"""``megatron-fcp simulate``: what a plan costs on a cluster that nobody has here."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from megatron_fcp.commands.arguments import at_least
from megatron_fcp.commands.output import duration, long_work, percent, print_json, print_table
from megatron_fcp.commands.scenario import (
    add_layer_arguments,
    add_model_arguments,
    add_scale_arguments,
    scenario_from,
)
from megatron_fcp.config import FcpConfig, Layout
from megatron_fcp.simulate.summary import TIERS, summarise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    add_scale_arguments(parser)
    add_model_arguments(parser)
    add_layer_arguments(parser)
    parser.add_argument(
        "--layout", choices=get_args(Layout), default="resident",
        help="reshuffle adds the traffic of Q, K, V and output at every attention (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--head-groups", type=at_least(1), default=FcpConfig.head_groups, metavar="N",
        help="groups of KV heads, at most, that the reshuffle layout moves in turn (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Plan, simulate and print."""
    scenario = scenario_from(arguments)
    config = FcpConfig(layout=arguments.layout, head_groups=arguments.head_groups)
    kinds = len(scenario.model.layers_by_window) if scenario.model else 1
    passes = 2 * kinds * (1 if scenario.model is None else 2) * (3 if config.layout == "reshuffle" else 1)
    with long_work("planning and simulating", scenario.seconds(passes), 2) as step:
        plan = scenario.plan_with(config)
        step("planned")
        figures = summarise(plan, scenario.case, config=config, model=scenario.model, parallel=scenario.parallel)
        step("simulated")
    if arguments.json:
        print_json(figures)
    else:
        _print(figures)
    return 0


def _print(f: dict[str, Any]) -> None:
    title = (
        f"{f['documents']:,} documents (longest {f['longest_document']:,} tokens) on {f['cp_size']} ranks of "
        f"{f['hardware']}, {f['tokens_per_rank']:,} tokens each, {f['layout']} layout"
        + ("" if f["window"] is None else f", a window of {f['window']:,}")
    )
    _print_attention(title, f)
    if windowed := f.get("windowed"):
        _print_attention(f"{windowed['layers']} layers with a window of {windowed['window']:,}", windowed)
    print(f"blocks of {f['block_size']:,} tokens")
    if step := f.get("step"):
        _print_step(step)


def _print_attention(title: str, f: dict[str, Any]) -> None:
    passes = (f["forward"], f["backward"])
    rows: list[list[str]] = [
        ["efficiency", *(percent(p["efficiency"]) for p in passes)],
        ["  as the runtime waits for room", *(percent(p["efficiency_as_run"]) for p in passes)],
        ["  if nobody ever waited", *(percent(p["efficiency_if_nobody_waited"]) for p in passes)],
        ["makespan of one attention", *(duration(p["makespan_s"]) for p in passes)],
        ["kernel time, max / mean", *(f"{p['compute_imbalance']:.3f}" for p in passes)],
    ]
    for tier in reversed(TIERS):
        cells = (p["traffic"][tier] for p in passes)
        rows.append(
            [f"MB received {tier}, mean / max", *(
                f"{c['received_mean_bytes'] / 1e6:.0f} / {c['received_max_bytes'] / 1e6:.0f}" for c in cells
            )]
        )  # fmt: skip
    print_table(title, ["one attention layer", "forward", "backward"], rows)
    print(
        f"{f['rounds']} rounds (lower bound {f['rounds_lower_bound']}), {f['messages']:,} messages, "
        f"up to {f['stages']} stages"
    )


def _print_step(step: dict[str, Any]) -> None:
    rows = [
        ["step", duration(step["seconds"])],
        ["tokens per second and replica", f"{step['tokens_per_second']:,.0f}"],
        ["one layer, one micro-batch", duration(step["layer_seconds"])],
        ["  attention", duration(step["attention_seconds"])],
        ["  of which the layout's traffic", duration(step["reshuffle_seconds"])],
        ["  linear layers", duration(step["linear_seconds"])],
        ["pipeline bubble", percent(step["bubble"])],
        [f"memory of rank {step['busiest_rank']}", f"{step['memory_bytes_busiest_rank'] / 1e9:.1f} GB"],
        ["  of which KV of others", f"{step['memory_bytes_of_others_kv'] / 1e9:.2f} GB"],
    ]
    print_table(f"training step of {step['model']}", ["", "slowest rank"], rows)
