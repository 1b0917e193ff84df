"""Memory of every rank: weights, activations, and what a plan holds of other ranks' KV.

An estimate to refuse what cannot fit, not an allocator: weights in bf16 with fp32 gradients and Adam states sharded
over data- and context-parallel ranks (Megatron's distributed optimizer), activations after
``megatron/training/theoretical_memory_usage.py`` with flash attention and sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, offsets
from megatron_fcp.plan.plan import Plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.lower import PUSH_FACTOR, message_stages
from megatron_fcp.simulate.models import ModelShape, Parallel


@dataclass(frozen=True)
class Memory:
    """Bytes per rank of the heaviest pipeline stage.

    Attributes
    ----------
    weights, activations : float
        The same on every rank of a context-parallel group.
    buffers : FloatArray, shape [cp_size]
        KV of two stages, and in backward their partial dKV.
    """

    weights: float
    activations: float
    buffers: FloatArray

    @property
    def total(self) -> FloatArray:
        """Bytes of each rank, shape [cp_size]."""
        return self.weights + self.activations + self.buffers

    @property
    def busiest(self) -> int:
        """Rank with the most."""
        return int(self.total.argmax())

    def check(self, case: Case) -> None:
        """Raise if a rank needs more than the cluster has.

        Raises
        ------
        ValueError
            Naming the busiest rank, what it needs and by how much that is too much.
        """
        need, have = float(self.total[self.busiest]), case.hardware.memory_bytes
        if need > have:
            raise ValueError(
                f"rank {self.busiest} needs {need / 1e9:.1f} GB ({self.weights / 1e9:.1f} weights and optimizer, "
                f"{self.activations / 1e9:.1f} activations, {self.buffers[self.busiest] / 1e9:.1f} KV of others), "
                f"{(need - have) / 1e9:.1f} GB more than the {have / 1e9:.1f} GB of {case.hardware.name}; raise "
                "--cp-size, --tensor or --pipeline, turn on --recompute, or lower --tokens-per-rank"
            )


def step_memory(plan: Plan | None, case: Case, model: ModelShape, parallel: Parallel) -> Memory:
    """Memory of a training step; ``plan`` None counts no buffers."""
    layers = model.num_layers // parallel.pipeline
    dense = layers * model.attention_parameters
    experts = layers * model.mlp_parameters * model.experts
    if model.experts > 1:
        dense += layers * model.hidden * model.experts  # router
    else:
        dense, experts = dense + experts, 0
    dense += model.vocab * model.hidden  # the first stage's embedding, or the last one's output layer
    replicas = case.cp_size * parallel.data
    held = dense / parallel.tensor
    weights = held * (2 + 4 + 12 / replicas)
    sharded = experts / parallel.tensor / parallel.expert
    weights += sharded * (2 + 4 + 12 / max(replicas / parallel.expert, 1))
    buffers = np.zeros(case.cp_size) if plan is None else held_bytes(plan, case)
    return Memory(weights, activation_bytes(case, model, parallel), buffers)


def activation_bytes(case: Case, model: ModelShape, parallel: Parallel) -> float:
    """Saved activations of the first pipeline stage, and the logits of the last."""
    per_token = 2 * model.hidden * 4  # inputs of both norms, of attention and of the MLP
    per_token += 2 * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads) + 4 * model.num_heads
    per_token += 2 * 3 * model.ffn * model.top_k
    layers, in_flight = model.num_layers // parallel.pipeline, min(parallel.pipeline, parallel.micro_batches)
    saved = layers * in_flight * (2 * model.hidden if parallel.recompute else per_token)
    working = per_token if parallel.recompute else 0
    logits = 6 * model.vocab  # bf16 logits and fp32 gradient
    return case.tokens_per_rank * max(saved + working, layers * per_token + logits) / parallel.tensor


def held_bytes(plan: Plan, case: Case) -> FloatArray:
    """KV and partial dKV of two neighbouring stages, the runtime's bound; bytes by rank, shape [cp_size]."""
    stages = offsets([ends.size + 2 for ends in plan.schedule.stage_ends])  # one empty stage behind the last
    m = plan.schedule.messages
    tokens = (plan.table.shared_stop - plan.table.shared_start)[m.block]
    stage: IntArray = np.repeat(message_stages(plan) + stages[m.dst], np.diff(m.ptr))
    held = np.bincount(stage, tokens, minlength=int(stages[-1]))
    pairs = np.maximum.reduceat(held + np.append(held[1:], 0.0), stages[:-1])
    staging = np.zeros(plan.cp_size)
    np.maximum.at(staging, m.dst, np.add.reduceat(tokens, m.ptr[:-1]) if len(m) else np.zeros(0))
    return (pairs * (1 + PUSH_FACTOR) + staging * PUSH_FACTOR) * case.forward.kv_bytes
