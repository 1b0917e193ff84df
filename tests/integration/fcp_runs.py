"""Runs of the tests' model with and without FCP: from the same weights, on the same data, each run once per session."""

from __future__ import annotations

from typing import Any

from megatron_fcp.testing.loop import TrainingJob, TrainingLoop, TrainingResult, tiny_model_args

# Documents whose boundaries are end-of-document tokens, as Megatron's attention mask sees them on one rank.
EOD = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
# The same documents by the data set's index, handed on as cu_seqlens: --dataloader-inter-document-masking.
INDEX = {"dataloader_inter_document_masking": True, "eod_mask_loss": True}

MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
MLA = {
    "multi_latent_attention": True,
    "group_query_attention": None,
    "num_query_groups": None,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "context_parallel_backend": "fcp",  # Megatron's local attention cannot do MLA, on one rank either
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SPLIT_TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = ("reshuffle", "resident")


def fcp(layout: str, cp_size: int = 2, **flags: Any) -> dict[str, Any]:
    """Flags of a run with FCP; blocks are small enough for several on each rank."""
    return {
        "context_parallel_size": cp_size,
        "context_parallel_backend": "fcp",
        "fcp_layout": layout,
        "fcp_block_size": 8,
        **flags,
    }


class Runs:
    """Trains the tests' model on real documents; a run that was asked for before is not repeated."""

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self._known: dict[tuple[Any, ...], TrainingResult] = {}

    def __call__(
        self,
        world_size: int = 1,
        model: dict[str, Any] | None = None,
        *,
        before: tuple[str, ...] = (),
        script: str | None = None,
        **flags: Any,
    ) -> TrainingResult:
        """Train ``model`` (flags that decide on the weights) with ``flags`` on ``world_size`` ranks."""
        model = model or {}
        data = {"mock_data": None, "data_path": self.loop.corpus().prefix}
        start = {"pretrained_checkpoint": self.loop.initial_checkpoint(**model)}
        argv = tiny_model_args(**{**data, **start, **model, **flags})
        key = (world_size, before, script, *argv)
        if key not in self._known:
            more = {} if script is None else {"script": script}
            job = TrainingJob(argv, world_size, gradients=True, parameters=True, before=before, **more)
            self._known[key] = self.loop.run(job)
        return self._known[key]
