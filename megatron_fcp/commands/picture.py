"""A picture of a plan: who owns which block, how the work is spread, and who receives from whom in which round."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_fcp.files import write_figure
from megatron_fcp.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

MANY_RANKS = 20  # from here on, ranks are told apart by a colour scale and sparse labels
MAX_LABELLED_CELLS = 400
MAX_EDGED_BLOCKS = 200
MAX_SPACED_RANKS = 64


def placement_picture(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw ``plan`` into an image file; the suffix of ``path`` names the format.

    Three panels: the stream with its documents and the owner of each block; query-key pairs per rank; and for each rank
    and round the peer that it receives KV from.

    Raises
    ------
    ValueError
        If matplotlib is not installed, or does not know the format.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("pictures need matplotlib; install it with `pip install 'megatron-fcp[plots]'`") from error
    cp_size = plan.cp_size
    row = 0.16 if _two_tiers(plan) else 0.1  # inches
    height = float(np.clip(1.2 + row * cp_size, 2.0, 9.0))
    figure = Figure(figsize=(14, 1.6 + 2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 2, width_ratios=(5, 1), height_ratios=(0.55 / height, 1, 1))
    colors = matplotlib.colormaps["tab10" if cp_size <= 10 else "tab20" if cp_size <= MANY_RANKS else "turbo"]
    stream = figure.add_subplot(grid[0, 0])
    owners = figure.add_subplot(grid[1, 0], sharex=stream)
    load = figure.add_subplot(grid[1, 1])
    rounds = figure.add_subplot(grid[2, :])
    _draw_documents(stream, plan)
    _draw_owners(owners, plan, colors)
    _draw_load(load, plan, colors)
    _draw_rounds(rounds, plan, colors)
    table = plan.table
    figure.suptitle(
        f"{table.document_length.size:,} documents, {table.real_tokens:,} tokens, {table.num_blocks:,} blocks of "
        f"{table.block_size:,} on {cp_size} rank{'s' if cp_size > 1 else ''}",
        fontsize=13,
    )
    write_figure(figure, path, dpi=120)


def _rank_color(rank: int, cp_size: int, colors: Colormap) -> Any:
    return colors(rank if cp_size <= MANY_RANKS else (rank + 0.5) / cp_size)


def _thickness(cp_size: int) -> float:
    """Height of a rank's bar, with a gap between ranks where there are pixels for it."""
    return 0.9 if cp_size <= MAX_SPACED_RANKS else 1.0


def _two_tiers(plan: Plan) -> bool:
    return 1 < plan.ranks_per_node < plan.cp_size


def _rank_axis(axes: Axes, cp_size: int) -> None:
    step = max(1, -(-cp_size // 16))
    axes.set_yticks(range(0, cp_size, step))
    axes.set_ylim(cp_size - 0.5, -0.5)
    axes.set_ylabel("rank")


def _draw_documents(axes: Axes, plan: Plan) -> None:
    """The stream as a strip: neighbouring documents in two shades, padding hatched."""
    table = plan.table
    axes.set_title("documents in the stream (hatched: padding)", loc="left", fontsize=10)
    axes.set_xlim(0, table.num_tokens)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.tick_params(labelbottom=False)
    axes.axvspan(0, table.num_tokens, facecolor="white", edgecolor="0.6", hatch="////", linewidth=0)
    spans = list(zip(table.document_start.tolist(), table.document_length.tolist()))
    for shade, chosen in (("#4c566a", spans[::2]), ("#a9b4c8", spans[1::2])):
        axes.broken_barh(chosen, (0, 1), facecolors=shade, linewidth=0)


def _draw_owners(axes: Axes, plan: Plan, colors: Colormap) -> None:
    """Stream on x, rank on y: a block is drawn in the row of its owner."""
    axes.set_title("owner of each block", loc="left", fontsize=10)
    size = plan.table.block_size
    few = plan.table.num_blocks <= MAX_EDGED_BLOCKS
    thick = _thickness(plan.cp_size)
    axes.set_facecolor("0.95")
    for rank in range(plan.cp_size):
        spans = [(block * size, size) for block in plan.placement.blocks_of(rank).tolist()]
        color = _rank_color(rank, plan.cp_size, colors)
        edge = {"edgecolor": "white", "linewidth": 0.3} if few else {"edgecolor": color, "linewidth": 0.7}
        axes.broken_barh(spans, (rank - thick / 2, thick), facecolors=color, **edge)  # edges keep thin blocks visible
    _rank_axis(axes, plan.cp_size)
    axes.set_xlabel("token of the stream")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="x", color="white")
    axes.set_axisbelow(True)


def _draw_load(axes: Axes, plan: Plan, colors: Colormap) -> None:
    """Query-key pairs of each rank against their mean."""
    cost = plan.placement.rank_cost(plan.table)
    load = cost / cost.mean() if cost.any() else np.ones(plan.cp_size)
    axes.set_title(f"compute, max / mean {load.max():.3f}", loc="left", fontsize=10)
    ranks = range(plan.cp_size)
    axes.barh(
        ranks, load, height=_thickness(plan.cp_size), color=[_rank_color(rank, plan.cp_size, colors) for rank in ranks]
    )
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("pairs over their mean")
    axes.set_xlim(0, 1.08 * float(load.max()))
    _rank_axis(axes, plan.cp_size)


def _draw_rounds(axes: Axes, plan: Plan, colors: Colormap) -> None:
    """Rank on y, round on x: the colour (and, where there is room, the number) of the rank that it receives from.

    With two tiers a cell is split: what comes from inside the node above, from another node below.
    """
    from matplotlib.collections import PolyCollection

    schedule, cp_size = plan.schedule, plan.cp_size
    first, *others = schedule.stage_ends
    shared_ends = first if all(np.array_equal(first, other) for other in others) else first[:0]
    axes.set_title(
        "sender that each rank receives KV from, by round"
        + (" (lines: ends of stages)" if shared_ends.size > 1 else ""),
        loc="left",
        fontsize=10,
    )
    axes.set_facecolor("0.95")
    tiers = 1 + _two_tiers(plan)
    labelled = schedule.num_rounds * cp_size <= MAX_LABELLED_CELLS
    messages = zip(schedule.message_round.tolist(), schedule.messages.src.tolist(), schedule.messages.dst.tolist())
    thick = _thickness(cp_size)
    corners: list[list[tuple[float, float]]] = []
    faces: list[Any] = []
    for round_, src, dst in messages:
        between = src // plan.ranks_per_node != dst // plan.ranks_per_node
        low = dst - thick / 2 + (thick / 2 if tiers == 2 and between else 0)
        high = low + thick / tiers
        left, right = round_ - 0.47, round_ + 0.47
        corners.append([(left, low), (right, low), (right, high), (left, high)])
        faces.append(_rank_color(src, cp_size, colors))
        if labelled:
            ink = "black" if sum(faces[-1][:3]) > 1.5 else "white"
            axes.text(round_, (low + high) / 2, str(src), ha="center", va="center", fontsize=8, color=ink)
    axes.add_collection(PolyCollection(corners, facecolors=faces, linewidths=0))
    _rank_axis(axes, cp_size)
    axes.set_xlim(-0.5, max(schedule.num_rounds, 1) - 0.5)
    step = max(1, -(-schedule.num_rounds // 32))
    axes.set_xticks(range(0, schedule.num_rounds, step))
    split = "; upper half: inside the node, lower half: between nodes" if tiers == 2 else ""
    axes.set_xlabel(f"round{split}" if schedule.num_rounds else "no rounds: nothing has to move")
    for end in shared_ends[:-1].tolist():
        axes.axvline(end + 0.5, color="black", linewidth=1)
