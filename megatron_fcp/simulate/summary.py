"""A case and its plan in figures, for tables and JSON."""

from __future__ import annotations

from typing import Any

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan.plan import Plan, with_window
from megatron_fcp.plan.schedule import rounds_lower_bound
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.models import ModelShape, Parallel
from megatron_fcp.simulate.program import Timeline
from megatron_fcp.simulate.reshuffle import with_reshuffle
from megatron_fcp.simulate.step import price_step

TIERS = ("inside nodes", "between nodes")


def summarise(
    plan: Plan, case: Case, *, config: FcpConfig | None = None, model: ModelShape | None = None,
    parallel: Parallel | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Figures of both passes, and of the whole step where a model is given.

    Where the model mixes layers with a window and layers without, those of the former are under ``windowed``.
    """
    config = config or FcpConfig(layout="resident")
    out: dict[str, Any] = {
        "hardware": case.hardware.name,
        "cp_size": case.cp_size,
        "tokens_per_rank": case.tokens_per_rank,
        "documents": int(case.lengths.size),
        "longest_document": int(case.lengths.max(initial=0)),
        "block_size": plan.table.block_size,
        "layout": config.layout,
        **_attention(plan, case, config),
    }
    for window, layers in model.layers_by_window.items() if model else ():
        if window != case.window:
            other = _attention(with_window(plan, window, config), case.replace(window=window), config)
            out["windowed"] = {"layers": layers, **other}
    if model is not None:
        step = price_step(plan, case, model, parallel or Parallel(), config=config)
        out["step"] = {
            "model": model.name,
            "seconds": step.step,
            "layer_seconds": step.layer,
            "attention_seconds": step.forward + step.backward,
            "reshuffle_seconds": step.reshuffle,
            "linear_seconds": step.linear,
            "bubble": step.bubble,
            "tokens_per_second": step.tokens_per_second(case, parallel or Parallel()),
            "memory_bytes_busiest_rank": step.memory.total,
            "busiest_rank": step.memory.rank,
            "memory_bytes_of_others_kv": step.memory.buffers,
        }
        step.memory.check(case)
    return out


def _attention(plan: Plan, case: Case, config: FcpConfig) -> dict[str, Any]:
    """Rounds and both passes of one layer."""
    messages = plan.schedule.messages
    return {
        "window": plan.table.window,
        "stages": max(ends.size for ends in plan.schedule.stage_ends),
        "rounds": plan.schedule.num_rounds,
        "rounds_lower_bound": rounds_lower_bound(messages, plan.ranks_per_node) if len(messages) else 0,
        "messages": len(messages),
        "forward": _pass(plan, case, config, backward=False),
        "backward": _pass(plan, case, config, backward=True),
    }


def _pass(plan: Plan, case: Case, config: FcpConfig, *, backward: bool) -> dict[str, Any]:
    program = plan_program(plan, case, backward=backward)
    held = plan_program(plan, case, backward=backward, wait_for_room=True)
    if config.layout == "reshuffle":
        groups = config.head_groups
        program, held = (with_reshuffle(p, plan, case, groups=groups, backward=backward) for p in (program, held))
    timeline = program.run()
    ideal = case.ideal(backward=backward)
    heaviest = float(timeline.compute.max())
    return {
        "makespan_s": timeline.makespan,
        "efficiency": ideal / timeline.makespan if timeline.makespan else 1.0,
        "efficiency_as_run": ideal / held.run().makespan if heaviest else 1.0,
        "efficiency_if_nobody_waited": ideal / heaviest if heaviest else 1.0,
        "compute_imbalance": timeline.imbalance,
        "traffic": {name: _traffic(timeline, tier) for tier, name in enumerate(TIERS)},
    }


def _traffic(timeline: Timeline, tier: int) -> dict[str, float]:
    received, sent = timeline.bytes_moved(tier, sends=False), timeline.bytes_moved(tier, sends=True)
    return {
        "received_mean_bytes": float(received.mean()),
        "received_max_bytes": float(received.max()),
        "sent_max_bytes": float(sent.max()),
        "busiest_link_s": float(
            max(timeline.link_seconds(tier, sends=True).max(), timeline.link_seconds(tier, sends=False).max())
        ),
    }
