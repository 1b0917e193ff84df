"""``megatron-fcp plan``: plan a packed stream, write its plan file, print its figures."""

from __future__ import annotations

import argparse

from megatron_fcp.commands.arguments import add_kv_arguments, add_stream_arguments, plan_of
from megatron_fcp.commands.output import check_output, long_work, naming, print_json
from megatron_fcp.plan.bounded import DEFAULT_MULTIPLE
from megatron_fcp.plan.planfile import write_plan
from megatron_fcp.plan.report import PlanReport, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    add_stream_arguments(parser)
    add_kv_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="FILE", help="write the plan file; gzipped if FILE ends in .gz")
    output.add_argument("--picture", metavar="FILE", help="draw placement, load and rounds (needs matplotlib)")
    output.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Plan, write and print."""
    check_output("--out", arguments.out)
    check_output("--picture", arguments.picture, picture=True)
    ranks, tokens = arguments.cp_size or 1, arguments.tokens_per_rank or 1
    with long_work("planning", 2 * (ranks * tokens / 2**25) ** 1.2, 1):
        plan = plan_of(arguments)
    with long_work("adding up the ranks", plan.cp_size * 0.015, 1):
        figures = report(
            plan,
            num_kv_heads=arguments.num_kv_heads,
            head_dim=arguments.head_dim,
            dtype_bytes=arguments.dtype_bytes,
        )
    if arguments.out is not None:
        with naming("--out", arguments.out):
            write_plan(plan, arguments.out)
    if arguments.picture is not None:
        from megatron_fcp.commands.picture import placement_picture

        with naming("--picture", arguments.picture):
            placement_picture(plan, arguments.picture)
    if arguments.json:
        print_json(figures.to_dict())
    else:
        print(format_report(figures, _limit(arguments, figures)))
    return 0


def _limit(arguments: argparse.Namespace, figures: PlanReport) -> int | None:
    """KV tokens that a rank was allowed to hold; None where there was no limit, or a file does not tell."""
    if arguments.kv_buffer_tokens is None and arguments.hardware is not None:
        return DEFAULT_MULTIPLE * figures.tokens_per_rank
    return arguments.kv_buffer_tokens


def format_report(figures: PlanReport, limit: int | None = None) -> str:
    """The figures as a short table; ``limit``: KV tokens that a rank may hold."""
    r = figures
    mask = f"{r.mask} mask" if r.window is None else f"{r.mask} mask, window {r.window:,}"
    padding = 1 - r.real_tokens / (r.cp_size * r.tokens_per_rank)
    saved = f"{r.ring_kv_tokens / r.kv_tokens:.1f} times as much" if r.kv_tokens else "FCP moves nothing"
    rows = [
        ("stream", f"{r.num_documents:,} documents, {r.real_tokens:,} tokens and {padding:.1%} padding, {mask}"),
        ("blocks", f"{r.num_blocks:,} of {r.block_size:,} tokens on {r.cp_size:,} ranks"),
        ("tokens per rank", f"{r.tokens_per_rank:,} ({r.real_tokens_min:,} to {r.real_tokens_max:,} of documents)"),
        ("compute, max / mean", f"{r.compute_imbalance:.4f} ({r.pairs_max:,} / {r.pairs_mean:,.0f} query-key pairs)"),
        ("rounds", f"{r.rounds:,} (lower bound {r.rounds_lower_bound:,}), {r.num_messages:,} messages"),
        ("stages", f"up to {r.stages_max:,} with the local one; {r.push_rounds:,} push rounds in backward"),
    ]
    for tier in r.traffic:
        rows.append((f"KV {tier.name}", f"received {_spread(tier.received_mean, tier.received_max, r.kv_token_bytes)}"))
        rows.append(("", f"sent     {_spread(tier.sent_mean, tier.sent_max, r.kv_token_bytes)}"))
    rows += [
        ("KV moved", f"{_bytes(r.kv_tokens * r.kv_token_bytes)} per layer in forward, all ranks together"),
        ("a zig-zag ring", f"{_bytes(r.ring_kv_tokens * r.kv_token_bytes)} ({saved})"),
        (
            "memory, forward",
            f"{_bytes(r.forward_bytes)} on the busiest rank: {r.held_kv_tokens_forward:,} tokens of KV"
            + ("" if limit is None else f" of {limit:,} allowed"),
        ),
        (
            "memory, backward",
            f"{_bytes(r.backward_bytes)}: {r.held_kv_tokens_backward:,} tokens of KV, "
            f"{r.held_dkv_tokens_backward:,} of fp32 dKV at most",
        ),
        ("digest", r.digest),
    ]
    return "\n".join(f"{name:<20} {value}" for name, value in rows)


def _spread(mean: float, most: int, token_bytes: int) -> str:
    return f"{mean:,.0f} tokens mean, {most:,} max per rank ({_bytes(most * token_bytes)})"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:,.0f} B" if unit == "B" else f"{size:,.2f} {unit}"
