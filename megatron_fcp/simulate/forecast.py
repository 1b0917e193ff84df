"""Memory and step time of a job before it is launched, and splits of the same GPUs that would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.blocks import windowed_pairs
from megatron_fcp.plan.plan import Plan, make_plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import HardwareModel
from megatron_fcp.simulate.job import Job
from megatron_fcp.simulate.memory import Memory, step_memory
from megatron_fcp.simulate.models import Parallel
from megatron_fcp.simulate.step import StepPrice, price_step
from megatron_fcp.simulate.tune import Trial, candidates, tune

HEADROOM = 0.9  # of the GPU's memory: CUDA's context, NCCL's buffers and fragmentation are not in the estimate


@dataclass(frozen=True)
class Forecast:
    """What a job is expected to take.

    Attributes
    ----------
    case : Case
        The documents of one micro-batch on the job's ranks.
    plan : Plan
    price : StepPrice
        With the job's own settings.
    trials : list of Trial
        The tuner's, fastest first; empty when it was not asked.
    """

    case: Case
    plan: Plan
    price: StepPrice
    trials: list[Trial]

    @property
    def memory(self) -> Memory:
        """Of the busiest GPU."""
        return self.price.memory

    @property
    def fits(self) -> bool:
        """Whether the busiest GPU has that memory."""
        return self.memory.total <= self.case.hardware.memory_bytes


def job_case(job: Job, lengths: IntArray, hardware: HardwareModel) -> Case:
    """One micro-batch of a job; context-parallel ranks share nodes with tensor-parallel ones."""
    nodes = max(hardware.ranks_per_node // job.parallel.tensor, 1)
    hardware = replace(hardware, ranks_per_node=nodes)
    window = next(iter(job.model.layers_by_window))  # of the layers that tokens are placed for
    return Case(lengths, job.cp_size, job.tokens_per_rank, hardware, job.parallel.attention(job.model), window=window)


def forecast(job: Job, case: Case, *, tuned: bool = True, step: Callable[[str], None] = lambda _: None) -> Forecast:
    """Plan, price and, if ``tuned``, try other settings.

    Parameters
    ----------
    job : Job
    case : Case
        Of :func:`job_case`.
    tuned : bool
    step : callable
        Called after each of :func:`megatron_fcp.simulate.tune.candidates`, with what was tried.
    """
    cost = None if job.balanced else job.cost or case.forward
    plan = make_plan(
        case.lengths, cp_size=case.cp_size, tokens_per_rank=case.tokens_per_rank, config=job.config, hardware=cost,
        window=case.window,
    )  # fmt: skip
    price = price_step(plan, case, job.model, job.parallel, config=job.config)
    trials = []
    if tuned:
        trials = tune([case], candidates(case), model=job.model, parallel=job.parallel, step=step)
    return Forecast(case, plan, price, trials)


def step_flops(job: Job, case: Case) -> float:
    """Model FLOP of a step, recomputation left out: forward once, backward twice, attention inside documents."""
    model, shape = job.model, case.shape
    tokens = float(case.lengths.sum())
    linear = (model.num_layers * model.linear_flops() + 2 * model.hidden * model.vocab) * tokens
    kinds = model.layers_by_window.items()
    pairs = sum(layers * float(windowed_pairs(case.lengths, window).sum()) for window, layers in kinds)
    attention = shape.flops_per_pair * job.parallel.tensor * pairs
    return 3 * (linear + attention) * job.parallel.micro_batches * job.parallel.data


@dataclass(frozen=True)
class Split:
    """Another division of the same GPUs: how, over how many context-parallel ranks, and what a GPU then holds."""

    parallel: Parallel
    cp_size: int
    memory: Memory

    @property
    def slowdown(self) -> float:
        """Pipeline bubble and recomputation, as a factor on time."""
        p = self.parallel
        return (1 + (p.pipeline - 1) / p.micro_batches) * (4 / 3 if p.recompute else 1)


def splits_that_fit(job: Job, case: Case, most: int = 3) -> list[Split]:
    """Pipeline, context and data sizes of the same GPUs and tensor size that leave headroom, the promising first.

    All of them with the plain schedule. Buffers for KV of other ranks are not counted here.
    """
    limit = HEADROOM * case.hardware.memory_bytes
    rest = job.gpus // job.parallel.tensor
    found: list[Split] = []
    layers = job.model.num_layers + job.parallel.embedding_as_layer + job.parallel.loss_as_layer
    for pipeline in (p for p in range(1, rest + 1) if rest % p == 0 and layers % p == 0):
        for cp_size in (c for c in range(1, rest // pipeline + 1) if rest // pipeline % c == 0):
            data = rest // pipeline // cp_size
            samples = job.micro_batch_size * data
            whole = job.seq_length % (2 * cp_size * job.parallel.tensor) == 0
            experts = (job.parallel.expert_tensor or job.parallel.tensor) * job.parallel.expert * pipeline
            if job.global_batch_size % samples or not whole or job.gpus % experts:
                continue
            for recompute in (False, True):
                changes = {"pipeline": pipeline, "data": data, "recompute": recompute, "virtual": 1}
                parallel = replace(job.parallel, **changes, micro_batches=job.global_batch_size // samples)
                tokens = job.seq_length * job.micro_batch_size // cp_size
                other = replace(case, cp_size=cp_size, tokens_per_rank=tokens, lengths=case.lengths)
                memory = step_memory(None, other, job.model, parallel)
                if memory.total <= limit:
                    found.append(Split(parallel, cp_size, memory))
    return sorted(found, key=lambda s: (s.slowdown, s.memory.total))[:most]
