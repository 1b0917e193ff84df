"""The best block size, stages and layout for given documents and hardware, by trying them in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from megatron_fcp.config import FcpConfig, Layout
from megatron_fcp.plan.plan import Plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.models import ModelShape, Parallel
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.program import Timeline
from megatron_fcp.simulate.reshuffle import with_reshuffle
from megatron_fcp.simulate.step import HELD_STAGES, price_step

BLOCK_SIZES = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Trial:
    """One configuration and what it costs; seconds of one layer's attention, both passes, layout included.

    Attributes
    ----------
    config : FcpConfig
    forward, backward : float
        Efficiencies of the passes without the layout's traffic.
    seconds : float
        Both passes with the layout's traffic.
    step_seconds : float or None
        Of a whole step, where a model is given.
    received_bytes : float
        Mean per rank in forward, both tiers.
    rounds, stages : int
    """

    config: FcpConfig
    forward: float
    backward: float
    seconds: float
    step_seconds: float | None
    received_bytes: float
    rounds: int
    stages: int

    def as_dict(self) -> dict[str, Any]:
        """Figures and the settings that were tried."""
        out = {k: v for k, v in vars(self).items() if k != "config"}
        settings = ("block_size", "layout", "ranks_per_node")
        return {**{k: getattr(self.config, k) for k in settings}, **out}


def candidates(case: Case, layouts: Sequence[Layout] = get_args(Layout)) -> list[FcpConfig]:
    """Configurations worth trying: legal block sizes and layouts; the planner cuts the stages."""
    sizes = [b for b in BLOCK_SIZES if case.tokens_per_rank % b == 0]
    sizes = sizes or [FcpConfig().resolve_block_size(case.tokens_per_rank)]
    nodes = case.hardware.ranks_per_node
    return [FcpConfig(block_size=b, layout=layout, ranks_per_node=nodes) for layout in layouts for b in sizes]


def tune(
    cases: Sequence[Case], configs: Sequence[FcpConfig], *, model: ModelShape | None = None,
    parallel: Parallel | None = None, step: Callable[[str], None] = lambda _: None,
) -> list[Trial]:  # fmt: skip
    """Try every configuration on every case; fastest first, ties to the earlier one.

    Layouts share a plan, so each plan is made once per block size.
    """
    trials: list[Trial] = []
    plans: dict[tuple[int, int | None], Plan] = {}
    for config in configs:
        parts: list[Trial] = []
        for i, case in enumerate(cases):
            key = (i, config.block_size)
            if key not in plans:
                plans[key] = fcp_plan(case, config)
            parts.append(_try(plans[key], case, config, model, parallel))
            step(f"blocks of {config.block_size}, {config.layout}")
        trials.append(_mean(parts))
    return sorted(trials, key=lambda t: t.seconds if t.step_seconds is None else t.step_seconds)


def _try(plan: Plan, case: Case, config: FcpConfig, model: ModelShape | None, parallel: Parallel | None) -> Trial:
    bare: list[Timeline] = []
    seconds = 0.0
    for backward in (False, True):
        program = plan_program(plan, case, backward=backward, held_stages=HELD_STAGES)
        bare.append(program.run())
        if config.layout == "reshuffle":
            seconds += with_reshuffle(program, plan, case, backward=backward).run().makespan
        else:
            seconds += bare[-1].makespan
    step = price_step(plan, case, model, parallel or Parallel(), layout=config.layout).step if model else None
    received = sum(bare[0].bytes_moved(tier, sends=False).mean() for tier in (0, 1))
    return Trial(
        config,
        case.ideal() / bare[0].makespan if bare[0].makespan else 1.0,
        case.ideal(backward=True) / bare[1].makespan if bare[1].makespan else 1.0,
        seconds,
        step,
        float(received),
        plan.schedule.num_rounds,
        max(ends.size for ends in plan.schedule.stage_ends),
    )


def _mean(parts: list[Trial]) -> Trial:
    n = len(parts)
    step = None if parts[0].step_seconds is None else sum(t.step_seconds or 0.0 for t in parts) / n
    return Trial(
        parts[0].config,
        min(t.forward for t in parts),
        min(t.backward for t in parts),
        sum(t.seconds for t in parts) / n,
        step,
        sum(t.received_bytes for t in parts) / n,
        max(t.rounds for t in parts),
        max(t.stages for t in parts),
    )


def draw_curve(trials: Sequence[Trial], path: str) -> None:
    """Write a picture: efficiency and traffic against block size, every size tried."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    best: dict[int, Trial] = {}
    for t in trials:
        size = t.config.block_size or 0
        if size not in best or t.forward > best[size].forward:
            best[size] = t
    sizes = sorted(best)
    figure, left = plt.subplots(figsize=(5.6, 3.4))
    left.plot(sizes, [best[b].forward for b in sizes], "o-", color="black", label="forward efficiency")
    left.plot(sizes, [best[b].backward for b in sizes], "o--", color="gray", label="backward efficiency")
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(b) for b in sizes])
    left.set_xlabel("tokens per block")
    left.set_ylim(0, 1.02)
    left.set_ylabel("efficiency")
    left.grid(alpha=0.3)
    right = left.twinx()
    right.plot(sizes, [best[b].received_bytes / 1e6 for b in sizes], "s-", color="C0", label="received")
    right.set_ylabel("MB received per rank, forward", color="C0")
    right.set_ylim(bottom=0)
    left.legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
