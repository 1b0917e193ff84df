"""The best block size, layout and number of head groups for given documents and hardware, by trying them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from megatron_fcp.config import FcpConfig, Layout
from megatron_fcp.files import write_figure
from megatron_fcp.plan.plan import Plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import priced_tokens
from megatron_fcp.simulate.models import ModelShape, Parallel
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.step import price_attention, price_step

BLOCK_SIZES = (256, 512, 1024, 2048, 4096, 8192)
MOST_GROUPS = 8  # of heads


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

    @property
    def judged(self) -> float:
        """Seconds by which configurations are compared: of a step, or of both passes of an attention."""
        return self.seconds if self.step_seconds is None else self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Figures and the settings that were tried."""
        out = {k: v for k, v in vars(self).items() if k != "config"}
        settings = ("block_size", "layout", "head_groups", "ranks_per_node")
        return {**{k: getattr(self.config, k) for k in settings}, **out}


def candidates(case: Case, layouts: Sequence[Layout] = get_args(Layout)) -> list[FcpConfig]:
    """Configurations worth trying: legal block sizes and layouts, and in the reshuffle layout numbers of head groups.

    The planner cuts the stages.
    """
    sizes = [b for b in BLOCK_SIZES if case.tokens_per_rank % b == 0]
    sizes = sizes or [FcpConfig().resolve_block_size(case.tokens_per_rank)]
    nodes = case.hardware.ranks_per_node
    groups = [n for n in range(1, min(MOST_GROUPS, case.shape.num_kv_heads) + 1) if case.shape.num_kv_heads % n == 0]
    return [
        FcpConfig(block_size=b, layout=layout, ranks_per_node=nodes, head_groups=n)
        for layout in layouts
        for b in sizes
        for n in (groups if layout == "reshuffle" else [FcpConfig.head_groups])
    ]


def tune(
    cases: Sequence[Case], configs: Sequence[FcpConfig], *, model: ModelShape | None = None,
    parallel: Parallel | None = None, step: Callable[[str], None] = lambda _: None,
) -> list[Trial]:  # fmt: skip
    """Try every configuration on every case; fastest first, ties to the earlier one.

    What counts is the whole step where a model is given, else an attention's forward and backward with the layout's
    traffic. Configurations that differ in neither block size nor anything else that plans depend on share a plan.
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
            groups = f", head groups {config.head_groups}" if config.layout == "reshuffle" else ""
            step(f"blocks of {config.block_size}, {config.layout}{groups}")
        trials.append(_mean(parts))
    return sorted(trials, key=lambda t: t.judged)


def _try(plan: Plan, case: Case, config: FcpConfig, model: ModelShape | None, parallel: Parallel | None) -> Trial:
    messages = plan.schedule.messages
    received = int(priced_tokens(plan, messages).sum()) * case.forward.kv_bytes / case.cp_size
    rounds, stages = plan.schedule.num_rounds, max(ends.size for ends in plan.schedule.stage_ends)
    if model is not None:
        step = price_step(plan, case, model, parallel or Parallel(), config=config)
        return Trial(config, *step.efficiency, step.forward + step.backward, step.step, received, rounds, stages)
    price = price_attention(plan, case, config)
    forward, backward = (i / b if b else 1.0 for i, b in zip(price.ideal, price.bare))
    return Trial(config, forward, backward, price.forward + price.backward, None, received, rounds, stages)


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
        if size not in best or t.judged < best[size].judged:
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
    write_figure(figure, path)
    plt.close(figure)
