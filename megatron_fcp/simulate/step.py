"""A whole training step: attention of every layer, the linear layers around it, the pipeline around those.

::

    layer   | reshuffle in | attention | reshuffle out | linear layers |      forward, then the same backward
    step    (micro-batches + stages - 1) x layers of a stage x (forward + backward), plus embedding and loss

Context-parallel ranks meet in every attention, so a layer takes as long as its slowest rank. Matrix products outside
attention run at the hardware's kernel rate; tensor-parallel collectives and the optimizer are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fcp.config import Layout
from megatron_fcp.plan.plan import Plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.memory import Memory, step_memory
from megatron_fcp.simulate.models import ModelShape, Parallel
from megatron_fcp.simulate.reshuffle import with_reshuffle

HELD_STAGES = 2  # of KV, as the runtime


@dataclass(frozen=True)
class StepPrice:
    """Seconds of a step and of its parts on the slowest rank.

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

    def tokens_per_second(self, case: Case, parallel: Parallel) -> float:
        """Real tokens per second of one model replica."""
        return float(case.lengths.sum()) * parallel.micro_batches / self.step


def price_step(
    plan: Plan, case: Case, model: ModelShape, parallel: Parallel, *, layout: Layout = "resident"
) -> StepPrice:
    """Price a training step with ``plan`` for every micro-batch; ``case.shape`` must be ``parallel.attention(model)``.

    The memory is not checked; call ``StepPrice.memory.check``.
    """
    assert case.shape == parallel.attention(model), "the case must have the heads of one tensor-parallel rank"
    passes, bare = [], []
    for backward in (False, True):
        program = plan_program(plan, case, backward=backward, held_stages=HELD_STAGES)
        bare.append(program.run().makespan)
        if layout == "reshuffle":
            passes.append(with_reshuffle(program, plan, case, backward=backward).run().makespan)
        else:
            passes.append(bare[-1])
    rate = case.hardware.kernel_flops * parallel.tensor
    slowest = float(case.slowdown().max())
    token = case.tokens_per_rank / rate * slowest
    linear = model.linear_flops() * (4 if parallel.recompute else 3) * token
    again = passes[0] if parallel.recompute else 0.0
    layer = passes[0] + again + passes[1] + linear
    stages = parallel.pipeline
    idle = (stages - 1) / parallel.virtual
    turns = parallel.micro_batches + idle
    stage = layer * parallel.stage_layers(model)
    ends = 3 * 2 * model.hidden * model.vocab * token / stages  # output layer, spread as a balanced pipeline would
    return StepPrice(
        forward=passes[0],
        backward=passes[1],
        reshuffle=sum(passes) - sum(bare),
        linear=linear,
        layer=layer,
        step=turns * (stage + ends),
        bubble=idle / turns,
        efficiency=(
            case.ideal() / bare[0] if bare[0] else 1.0,
            case.ideal(backward=True) / bare[1] if bare[1] else 1.0,
        ),
        memory=step_memory(plan, case, model, parallel),
    )
