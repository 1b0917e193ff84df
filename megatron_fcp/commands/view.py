"""``megatron-fcp view``: one HTML page, complete in itself, to look at a plan and at what it does when."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_fcp.commands.output import print_json
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
    scenario = scenario_from(arguments)
    plan = scenario.plan_with()
    html = page(plan, scenario.case)
    Path(arguments.output).write_text(html, encoding="utf-8")
    if arguments.json:
        print_json({"file": arguments.output, "bytes": len(html.encode()), "ranks": plan.cp_size})
    else:
        print(f"{arguments.output}: {len(html) / 1e6:.1f} MB, {plan.cp_size} ranks; open it in a browser")
    return 0
