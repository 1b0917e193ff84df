"""A whole training step: attention of every layer, the linear layers around it, the pipeline around those.

::

    layer   | reshuffle in | attention | reshuffle out | linear layers |      forward, then the same backward
    step    (micro-batches + stages - 1) x layers of a stage x (forward + backward), plus embedding and loss

Context-parallel ranks meet in every attention, so a layer takes as long as its slowest rank. Layers with a window and
layers without share a placement and are priced each by its own plan; a stage takes as long as its layers together.
Matrix products outside attention run at the hardware's kernel rate; tensor-parallel collectives and the optimizer are
not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_fcp.config import FcpConfig, Layout
from megatron_fcp.plan.plan import Plan, with_window
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.memory import Memory, step_memory
from megatron_fcp.simulate.models import ModelShape, Parallel
from megatron_fcp.simulate.reshuffle import with_reshuffle


@dataclass(frozen=True)
class AttentionPrice:
    """Seconds of one layer's attention on the slowest rank.

    Attributes
    ----------
    window : int or None
        Of the layer.
    layers : int
        How many of the model's layers are such.
    forward, backward : float
        With the layout's traffic.
    bare : tuple of float
        Both passes without it.
    ideal : tuple of float
        Both passes on a perfect cluster.
    """

    window: int | None
    layers: int
    forward: float
    backward: float
    bare: tuple[float, float]
    ideal: tuple[float, float]


@dataclass(frozen=True)
class StepPrice:
    """Seconds of a step and of its parts on the slowest rank.

    Where layers with a window are mixed with others, a layer's figures are the mean over the slowest pipeline stage's.

    Attributes
    ----------
    forward, backward : float
        One layer's attention, with the layout's traffic.
    reshuffle : float
        Part of these two that the layout adds.
    linear : float
        One layer's other matrix products, forward and backward (and the recomputed forward).
    layer, step : float
        One layer of one micro-batch, and the whole step.
    bubble : float
        Share of the step in which a pipeline stage idles.
    efficiency : tuple of float
        Of the attention alone, forward and backward.
    memory : Memory
    kinds : tuple of AttentionPrice
        One for each window of the model's layers, first the kind that tokens are placed for.
    """

    forward: float
    backward: float
    reshuffle: float
    linear: float
    layer: float
    step: float
    bubble: float
    efficiency: tuple[float, float]
    memory: Memory
    kinds: tuple[AttentionPrice, ...]

    def tokens_per_second(self, case: Case, parallel: Parallel) -> float:
        """Real tokens per second of one model replica."""
        return float(case.lengths.sum()) * parallel.micro_batches / self.step


def price_step(
    plan: Plan, case: Case, model: ModelShape, parallel: Parallel, *, config: FcpConfig | None = None,
    layout: Layout | None = None,
) -> StepPrice:  # fmt: skip
    """Price a training step with ``plan`` for every micro-batch.

    Parameters
    ----------
    plan : Plan
        For the first of ``model.layers_by_window``; other windows' plans are derived from it.
    case : Case
        Its shape is ``parallel.attention(model)``, its window the plan's. The memory is not checked; call
        ``StepPrice.memory.check``.
    model : ModelShape
    parallel : Parallel
    config : FcpConfig, optional
        Layout, groups of heads, blocks per message; default: the resident layout.
    layout : {"resident", "reshuffle"}, optional
        Instead of ``config``'s.
    """
    assert case.shape == parallel.attention(model), "the case must have the heads of one tensor-parallel rank"
    config = config or FcpConfig(layout="resident")
    config = replace(config, layout=layout or config.layout)
    counts = model.layers_by_window
    assert case.window == next(iter(counts)), "tokens are placed for the layers that see most"
    plans = {window: with_window(plan, window, config) for window in counts}
    kinds = {
        window: price_attention(plans[window], case.replace(window=window), config, layers=count)
        for window, count in counts.items()
    }
    rate = case.hardware.kernel_flops * parallel.tensor
    token = case.tokens_per_rank / rate * float(case.slowdown().max())
    linear = model.linear_flops() * (4 if parallel.recompute else 3) * token
    stages = [[kinds[model.layer_window(layer)] for layer in layers] for layers in parallel.layers_of_stages(model)]
    seconds = [sum(_layer(kind, linear, parallel.recompute) for kind in stage) for stage in stages]
    slowest = seconds.index(max(seconds))
    stage, count = stages[slowest], len(stages[slowest])
    idle = (parallel.pipeline - 1) / parallel.virtual
    turns = parallel.micro_batches + idle
    ends = 3 * 2 * model.hidden * model.vocab * token / parallel.pipeline  # output layer, spread as if balanced
    memories = [step_memory(p, case, model, parallel) for p in plans.values()]
    bare, ideal = ([sum(getattr(kind, what)[i] for kind in stage) for i in (0, 1)] for what in ("bare", "ideal"))
    forward, backward = (sum(getattr(kind, what) for kind in stage) / count for what in ("forward", "backward"))
    return StepPrice(
        forward=forward,
        backward=backward,
        reshuffle=forward + backward - sum(bare) / count,
        linear=linear,
        layer=seconds[slowest] / count,
        step=turns * (seconds[slowest] + ends),
        bubble=idle / turns,
        efficiency=(ideal[0] / bare[0] if bare[0] else 1.0, ideal[1] / bare[1] if bare[1] else 1.0),
        memory=max(memories, key=lambda memory: memory.total),
        kinds=tuple(kinds.values()),
    )


def price_attention(plan: Plan, case: Case, config: FcpConfig, *, layers: int = 1) -> AttentionPrice:
    """Price one layer's attention, as ``config`` lays tokens out; ``layers`` of them are in the model."""
    around: list[float] = []
    bare: list[float] = []
    for backward in (False, True):
        program = plan_program(plan, case, backward=backward, wait_for_room=True)
        bare.append(program.run().makespan)
        if config.layout == "reshuffle":
            wrapped = with_reshuffle(program, plan, case, groups=config.head_groups, backward=backward)
            around.append(wrapped.run().makespan)
        else:
            around.append(bare[-1])
    ideal = (case.ideal(), case.ideal(backward=True))
    return AttentionPrice(case.window, layers, around[0], around[1], (bare[0], bare[1]), ideal)


def _layer(kind: AttentionPrice, linear: float, recompute: bool) -> float:
    return kind.forward * (2 if recompute else 1) + kind.backward + linear
