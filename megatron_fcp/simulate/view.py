"""A plan as one HTML page without anything outside it: data, style and script are put into ``page/page.html``."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np

from megatron_fcp.plan.arrays import offsets
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.schedule import rounds_lower_bound
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.program import COMPUTE, JOIN, Timeline


def page(plan: Plan, case: Case, step: Callable[[str], None] = lambda _: None) -> str:
    """The page as text; ``step`` is told of each simulated pass."""
    files = resources.files("megatron_fcp.simulate") / "page"
    html = (files / "page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(plan, case, step), separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "/*STYLE*/": (files / "page.css").read_text(encoding="utf-8"),
        "/*SCRIPT*/": (files / "page.js").read_text(encoding="utf-8"),
        "/*DATA*/": data,
    }
    for mark, text in parts.items():
        assert mark in html, mark
        html = html.replace(mark, text)
    return html


def page_data(plan: Plan, case: Case, step: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """What the page shows: microseconds, bytes, and plain lists."""
    table, messages = plan.table, plan.schedule.messages
    passes = []
    for name, backward in (("forward", False), ("backward", True)):
        timeline = plan_program(plan, case, backward=backward, wait_for_room=True).run()
        ideal = case.ideal(backward=backward)
        passes.append(
            {"name": name, "efficiency": ideal / timeline.makespan if timeline.makespan else 1.0, **_timeline(timeline)}
        )
        step(name)
    bound = rounds_lower_bound(messages, plan.ranks_per_node) if len(messages) else 0
    return {
        "title": f"FCP plan: {plan.cp_size} ranks, {plan.tokens_per_rank:,} tokens each, {case.hardware.name}",
        "figures": (
            f"{table.document_length.size:,} documents, longest {int(table.document_length.max(initial=0)):,} tokens; "
            f"{'' if table.window is None else f'a window of {table.window:,}; '}"
            f"blocks of {table.block_size:,}; {len(messages):,} messages in {plan.schedule.num_rounds} rounds; "
            f"digest {plan.digest[:16]}"
        ),
        "cp_size": plan.cp_size,
        "block_size": table.block_size,
        "ranks_per_node": plan.ranks_per_node,
        "rounds": plan.schedule.num_rounds,
        "rounds_lower_bound": bound,
        "documents": table.document_length.tolist(),
        "block_rank": plan.placement.block_rank.tolist(),
        "fragment_ptr": offsets(np.bincount(table.fragment_block, minlength=table.num_blocks)).tolist(),
        "fragment_document": table.fragment_document.tolist(),
        "fragment_start": (table.fragment_start - table.document_start[table.fragment_document]).tolist(),
        "fragment_length": table.fragment_length.tolist(),
        "messages": {
            "round": plan.schedule.message_round.tolist(),
            "src": messages.src.tolist(),
            "dst": messages.dst.tolist(),
            "ptr": messages.ptr.tolist(),
            "block": messages.block.tolist(),
        },
        "passes": passes,
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    p = timeline.program
    shown = (p.kind != JOIN) & ((p.kind != COMPUTE) | (p.seconds > 0))
    columns = {"kind": p.kind, "src": p.src, "dst": p.dst, "tier": p.tier, "stage": p.stage, "round": p.round}
    out: dict[str, Any] = {name: column[shown].tolist() for name, column in columns.items()}
    out["bytes"] = p.size[shown].tolist()
    for name, seconds in (("start", timeline.start[shown]), ("end", timeline.end[shown])):
        out[name] = np.round(seconds * 1e6, 1).tolist()
    out["makespan"] = round(timeline.makespan * 1e6, 1)
    out["compute"] = np.round(timeline.compute * 1e6, 1).tolist()
    out["finish"] = np.round(timeline.finish * 1e6, 1).tolist()
    for name, sends in (("received", False), ("sent", True)):
        out[name] = sum(timeline.bytes_moved(tier, sends=sends) for tier in (0, 1)).tolist()  # type: ignore[union-attr]
    return out
