"""``megatron-fcp view``: one HTML page, complete in itself, to look at a plan and at what it does when."""

from __future__ import annotations

import argparse

from megatron_fcp.commands.output import check_output, long_work, print_json, write_output
from megatron_fcp.commands.scenario import add_model_arguments, add_scale_arguments, scenario_from
from megatron_fcp.simulate.view import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    add_scale_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="the HTML page")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Simulate and write the page."""
    check_output("--output", arguments.output)
    scenario = scenario_from(arguments)
    with long_work("planning and simulating", scenario.seconds(), 3) as step:
        plan = scenario.plan_with()
        step("planned")
        html = page(plan, scenario.case, step)
    write_output("--output", arguments.output, html)
    if arguments.json:
        print_json({"file": arguments.output, "bytes": len(html.encode()), "ranks": plan.cp_size})
    else:
        size = f"{len(html) / 1e6:.1f} MB" if len(html) >= 1e6 else f"{len(html) / 1e3:.0f} kB"
        print(f"{arguments.output}: {size}, {plan.cp_size} ranks; open it in a browser")
    return 0
