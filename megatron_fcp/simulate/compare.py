"""Systems against each other over workloads, scales and clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fcp.files import write_figure
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import AttentionShape, HardwareModel
from megatron_fcp.simulate.peers import run_system
from megatron_fcp.simulate.workloads import draw_lengths

# Seconds per cell at 256 ranks on one core of a server CPU, forward and backward; they grow with about n ** 1.5.
_SECONDS_AT_256 = {"fcp": 3.0, "magi": 3.0, "textbook-fcp": 2.0, "dynamic-cp": 2.0, "te-ring": 0.4, "bytescale": 0.5}
_OTHERS_AT_256 = 0.2


@dataclass(frozen=True)
class Cell:
    """One system on one draw; efficiencies against a perfect cluster."""

    system: str
    workload: str
    cp_size: int
    hardware: str
    seed: int
    forward: float
    backward: float
    imbalance: float
    communication: float

    def as_dict(self) -> dict[str, Any]:
        """Fields by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class Sweep:
    """What to compare: the product of all lists."""

    systems: Sequence[str]
    workloads: Sequence[str]
    scales: Sequence[int]
    hardware: Sequence[HardwareModel]
    seeds: Sequence[int] = (0,)
    tokens_per_rank: int = 32768
    shape: AttentionShape = AttentionShape()  # noqa: RUF009

    def __len__(self) -> int:
        return len(self.systems) * len(self.workloads) * len(self.scales) * len(self.hardware) * len(self.seeds)

    def estimate(self) -> float:
        """Seconds that :meth:`run` will take, roughly."""
        per_draw = sum(_SECONDS_AT_256.get(s, _OTHERS_AT_256) for s in self.systems)
        scales = sum((n / 256) ** 1.5 for n in self.scales)
        return 0.5 + per_draw * scales * len(self.workloads) * len(self.hardware) * len(self.seeds)

    def run(self, step: Callable[[str], None] = lambda _: None) -> list[Cell]:
        """All cells; ``step`` is told of each."""
        cells: list[Cell] = []
        for n in self.scales:
            for workload in self.workloads:
                for seed in self.seeds:
                    lengths = draw_lengths(workload, num_tokens=n * self.tokens_per_rank, seed=seed)
                    for hardware in self.hardware:
                        case = Case(lengths, n, self.tokens_per_rank, hardware, self.shape)
                        for system in self.systems:
                            cells.append(run_cell(system, case, workload, seed))
                            step(f"{system}, {workload}, {n} ranks, {hardware.name}")
        return cells


def run_cell(system: str, case: Case, workload: str, seed: int) -> Cell:
    """Forward and backward of one system."""
    forward = run_system(system, case).run()
    backward = run_system(system, case, backward=True).run().makespan
    communication = 1 - float(forward.compute.mean()) / forward.makespan if forward.makespan else 0.0
    return Cell(
        system, workload, case.cp_size, case.hardware.name, seed,
        case.ideal() / forward.makespan if forward.makespan else 1.0,
        case.ideal(backward=True) / backward if backward else 1.0,
        forward.imbalance, communication,
    )  # fmt: skip


def worst(cells: Sequence[Cell], **fixed: object) -> tuple[float, float]:
    """(forward, backward): the lowest over the cells whose fields equal ``fixed``."""
    chosen = [c for c in cells if all(getattr(c, k) == v for k, v in fixed.items())]
    return min(c.forward for c in chosen), min(c.backward for c in chosen)


def draw(cells: Sequence[Cell], path: str) -> None:
    """Write a picture: efficiency over ranks, one panel per cluster and workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    systems, scales = list(dict.fromkeys(c.system for c in cells)), sorted({c.cp_size for c in cells})
    rows, columns = (list(dict.fromkeys(getattr(c, k) for c in cells)) for k in ("hardware", "workload"))
    figure, axes = plt.subplots(
        len(rows), len(columns), figsize=(3.6 * len(columns) + 1.6, 2.9 * len(rows) + 0.4), squeeze=False, sharey=True
    )
    for row, hardware in zip(axes, rows):
        for axis, workload in zip(row, columns):
            for i, system in enumerate(systems):
                y = [worst(cells, system=system, cp_size=n, hardware=hardware, workload=workload)[0] for n in scales]
                ours = system == "fcp"
                axis.plot(
                    scales, y, marker="o" if ours else ".", linewidth=2.4 if ours else 1.2, label=system,
                    color="black" if ours else f"C{i}", zorder=3 if ours else 2,
                )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xticks(scales, [str(n) for n in scales])
            axis.set_ylim(0, 1.02)
            axis.grid(alpha=0.3)
            axis.set_title(f"{workload}, {hardware}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("context-parallel ranks")
    for row in axes:
        row[0].set_ylabel("forward efficiency")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - 1.5 / figure.get_figwidth(), 1))
    write_figure(figure, path)
    plt.close(figure)


def ratios(cells: Sequence[Cell], scale: int) -> dict[str, float]:
    """FCP's worst forward speed-up over each peer at ``scale``, over workloads, clusters and seeds."""
    ours = {(c.workload, c.hardware, c.seed): c.forward for c in cells if c.system == "fcp" and c.cp_size == scale}
    out: dict[str, float] = {}
    for c in cells:
        key = (c.workload, c.hardware, c.seed)
        if c.system != "fcp" and c.cp_size == scale and key in ours:
            out[c.system] = min(out.get(c.system, np.inf), ours[key] / c.forward)
    return out
