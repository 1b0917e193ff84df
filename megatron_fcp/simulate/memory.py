"""Memory of the busiest rank: weights, activations, and what a plan holds of other ranks' KV.

An estimate to refuse what cannot fit, not an allocator: weights in bf16 with fp32 gradients and Adam states sharded
over data- and context-parallel ranks (Megatron's distributed optimizer), activations after
``megatron/training/theoretical_memory_usage.py`` with flash attention and sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.bounded import received_tokens
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.transfers import message_tokens
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import PUSH_FACTOR
from megatron_fcp.simulate.models import ModelShape, Parallel


@dataclass(frozen=True)
class Memory:
    """Bytes of the busiest rank on the heaviest pipeline stage.

    Attributes
    ----------
    parameters, gradients, optimizer : float
        In bf16, in fp32, and fp32 copies with both moments: the same on every rank of a context-parallel group.
    activations : float
        The same, too.
    buffers : float
        KV of other ranks, their partial dKV, and what arrives of one's own, at the worst moment of a backward pass.
    rank : int
        The busiest.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    rank: int

    @property
    def weights(self) -> float:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Bytes of the busiest rank."""
        return self.weights + self.activations + self.buffers

    def check(self, case: Case) -> None:
        """Raise if the busiest rank needs more than the cluster has.

        Raises
        ------
        ValueError
            Naming the rank, what it needs and by how much that is too much.
        """
        have = case.hardware.memory_bytes
        if self.total > have:
            raise ValueError(
                f"rank {self.rank} needs {self.total / 1e9:.1f} GB ({self.weights / 1e9:.1f} weights and optimizer, "
                f"{self.activations / 1e9:.1f} activations, {self.buffers / 1e9:.1f} KV of others), "
                f"{(self.total - have) / 1e9:.1f} GB more than the {have / 1e9:.1f} GB of {case.hardware.name}; raise "
                "--cp-size, --tensor or --pipeline, turn on --recompute, or lower --tokens-per-rank"
            )


def step_memory(plan: Plan | None, case: Case, model: ModelShape, parallel: Parallel) -> Memory:
    """Memory of a training step; ``plan`` None counts no buffers."""
    rank, tokens = (0, 0) if plan is None else busiest_rank(plan)
    return Memory(
        *weight_bytes(model, parallel, case.cp_size),
        activations=activation_bytes(case.tokens_per_rank, model, parallel),
        buffers=tokens * case.forward.kv_bytes,
        rank=rank,
    )


def weight_bytes(model: ModelShape, parallel: Parallel, cp_size: int) -> tuple[float, float, float]:
    """Parameters, gradients and optimizer states of the heaviest pipeline stage on one rank."""
    layers, dense = parallel.stage_layers(model), model.experts == 1
    if parallel.pipeline == 1:
        stages = [(model.num_layers, 1 if model.tied else 2)]
    else:  # first, middle and last: layers, and whether there are embedding or output weights
        stages = [(layers - parallel.embedding_as_layer, 1), (layers, 0), (layers - parallel.loss_as_layer, 1)]
    expert_tensor = parallel.expert_tensor or parallel.tensor
    replicas = cp_size * parallel.data
    expert_replicas = max(replicas * parallel.tensor / (expert_tensor * parallel.expert), 1)

    def held(layers: int, tables: int) -> tuple[float, float]:
        cut = layers * (model.attention_parameters + dense * model.mlp_parameters) + tables * model.vocab * model.hidden
        whole = layers * (2 + (0 if dense else model.experts)) * model.hidden + model.hidden  # norms and routers
        experts = 0 if dense else layers * model.mlp_parameters * model.experts
        return cut / parallel.tensor + whole, experts / (expert_tensor * parallel.expert)

    shared, experts = max((held(*stage) for stage in stages), key=sum)
    optimizer = 12 * (shared / replicas + experts / expert_replicas)
    return 2 * (shared + experts), 4 * (shared + experts), optimizer


def activation_bytes(tokens: int, model: ModelShape, parallel: Parallel) -> float:
    """Activations of the first pipeline stage, or the last one's with the logits, for ``tokens`` per rank."""
    per_token = 2 * model.hidden * 4  # inputs of both norms, of attention and of the MLP
    per_token += 2 * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads) + 4 * model.num_heads
    per_token += 2 * 3 * model.ffn * model.top_k
    if model.experts > 1:  # tokens as they were handed to the experts
        per_token += 2 * model.hidden * model.top_k * (parallel.expert_tensor or parallel.tensor)
    layers, stages = parallel.stage_layers(model), parallel.pipeline
    saved = 2 * model.hidden if parallel.recompute else per_token
    working = per_token if parallel.recompute else 0
    logits = 6 * model.vocab  # bf16 logits and fp32 gradient
    # How many micro-batches' activations the first two stages hold, in layers; the interleaved schedule holds more.
    first = (layers - parallel.embedding_as_layer) * min(stages, parallel.micro_batches)
    second = layers * min(stages - 1, parallel.micro_batches)
    held = max(first, second) * (1 + (stages - 1) / (stages * parallel.virtual) if parallel.virtual > 1 else 1)
    last = (layers - (parallel.loss_as_layer and stages > 1)) * saved + logits
    return tokens * (max(held * saved, last) + working) / parallel.tensor


def busiest_rank(plan: Plan) -> tuple[int, int]:
    """The rank that holds most of others' KV and dKV in backward, and how much: tokens of bf16 KV.

    Exact peaks come from the ranks' programs of steps; a cheap bound says which ranks need not be looked at.
    """
    bound = held_bound(plan)
    best, most = 0, -1
    for rank in np.argsort(-bound, kind="stable").tolist():
        if bound[rank] <= most:
            break
        held = held_tokens(plan, rank)
        if held > most:
            best, most = rank, held
    return best, max(most, 0)


def held_tokens(plan: Plan, rank: int) -> int:
    """Most that ``rank`` holds in backward, in tokens of bf16 KV."""
    peak = plan.rank_plan(rank).peak_backward
    return peak.kv_tokens + PUSH_FACTOR * peak.dkv_tokens


def held_bound(plan: Plan) -> IntArray:
    """What no rank's :func:`held_tokens` exceeds, shape [cp_size]: all that it receives, and four new messages."""
    received, pushes = received_tokens(plan.table, plan.schedule, plan.cp_size), plan.push.messages
    staged = np.zeros(plan.cp_size, dtype=np.int64)
    np.maximum.at(staged, pushes.dst, message_tokens(plan.table, pushes))
    if plan.schedule.waves is not None:
        received = np.minimum(received, plan.schedule.waves.held_tokens)
    return received * (1 + PUSH_FACTOR) + 4 * staged * PUSH_FACTOR
