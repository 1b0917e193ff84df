"""``megatron-fcp trace``: a plan's passes as a trace file that Perfetto opens, with a recorded run beside it."""

from __future__ import annotations

import argparse

from megatron_fcp.commands.output import check_output, long_work, naming, print_json
from megatron_fcp.commands.scenario import add_model_arguments, add_scale_arguments, scenario_from
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.trace import measured_events, read_recording, trace_events, write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    add_scale_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--recording", metavar="FILE", help="fcp-recording/1 of a run of the same plan")
    parser.add_argument("--output", required=True, metavar="FILE", help="trace file (JSON); open it in ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Simulate forward, then backward, and write both."""
    check_output("--output", arguments.output)
    scenario = scenario_from(arguments)
    case = scenario.case
    events, measured, shift = [], [], 0.0
    with long_work("planning and simulating", scenario.seconds(4), 3) as step:
        plan = scenario.plan_with()
        if arguments.recording:
            measured = measured_events(read_recording(arguments.recording, plan.digest))
        step("planned")
        for backward in (False, True):
            timeline = plan_program(plan, case, backward=backward, wait_for_room=True).run()
            name = "backward" if backward else "forward"
            events += trace_events(timeline, shift_s=shift, name=name)
            shift += timeline.makespan
            step(name)
    with naming("--output", arguments.output):
        write_trace(arguments.output, events + measured, plan.cp_size)
    figures = {
        "file": arguments.output, "ranks": plan.cp_size, "planned_events": len(events),
        "measured_events": len(measured), "planned_s": shift,
    }  # fmt: skip
    if arguments.json:
        print_json(figures)
    else:
        print(
            f"{arguments.output}: {len(events):,} planned and {len(measured):,} measured events of {plan.cp_size} "
            "ranks; open it in https://ui.perfetto.dev"
        )
    return 0
