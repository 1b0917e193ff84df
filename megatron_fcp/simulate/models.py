"""Sizes of models and how they are split over a rank, as far as a step's time and memory depend on them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_fcp.config import check_at_least
from megatron_fcp.simulate.hardware import AttentionShape


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLPs.

    Attributes
    ----------
    name : str
    num_layers, hidden, ffn, num_heads, num_kv_heads, head_dim, vocab : int
        ``ffn`` is the width of one (expert's) MLP.
    experts, top_k : int
        1 and 1 for dense models.
    tied : bool
        Embedding and output layer share their weights.
    """

    name: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 1
    top_k: int = 1
    tied: bool = False

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's projections."""
        return self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one MLP."""
        return 3 * self.hidden * self.ffn

    def linear_flops(self) -> int:
        """Forward FLOP per token and layer outside attention's core."""
        return 2 * (self.attention_parameters + self.top_k * self.mlp_parameters)


# Published configurations: arXiv 2407.21783 (Llama 3) table 3, arXiv 2505.09388 (Qwen3) tables 1 and 2.
MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        ModelShape("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        ModelShape("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256),
        ModelShape("llama3-405b", 126, 16384, 53248, 128, 8, 128, 128256),
        ModelShape("qwen3-30b-a3b", 48, 2048, 768, 32, 4, 128, 151936, experts=128, top_k=8),
    )
}


@dataclass(frozen=True)
class Parallel:
    """How a model is split beside context parallelism.

    Attributes
    ----------
    tensor, pipeline, expert, data : int
        Sizes of the groups; ``data`` does not count context-parallel ranks.
    micro_batches : int
        Per step and pipeline.
    recompute : bool
        Whole layers are recomputed in backward.
    virtual : int
        Parts of a pipeline stage in the interleaved schedule; 1: the plain one.
    expert_tensor : int or None
        Tensor-parallel size of the experts; None: as of everything else.
    embedding_as_layer, loss_as_layer : bool
        The first or last pipeline stage has one layer fewer than the others.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    micro_batches: int = 1
    recompute: bool = False
    virtual: int = 1
    expert_tensor: int | None = None
    embedding_as_layer: bool = False
    loss_as_layer: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                check_at_least(f"--{field.name.replace('_', '-')}", getattr(self, field.name), 1)

    def attention(self, model: ModelShape) -> AttentionShape:
        """Heads of one rank.

        Raises
        ------
        ValueError
            If the tensor-parallel size does not divide the heads, or the pipeline the layers.
        """
        if model.num_heads % self.tensor:
            raise ValueError(f"--tensor {self.tensor} does not divide the {model.num_heads} heads of {model.name}")
        layers = model.num_layers + self.embedding_as_layer + self.loss_as_layer
        if layers % self.pipeline:
            raise ValueError(f"--pipeline {self.pipeline} does not divide the {layers} layers of {model.name}")
        kv_heads = max(model.num_kv_heads // self.tensor, 1)  # fewer KV heads than ranks are copied
        return AttentionShape(model.num_heads // self.tensor, kv_heads, model.head_dim)

    def stage_layers(self, model: ModelShape) -> int:
        """Layers of the fullest pipeline stage."""
        counted = model.num_layers + self.embedding_as_layer + self.loss_as_layer
        return min(counted // self.pipeline, model.num_layers)


def find_model(name: str) -> ModelShape:
    """A model by name.

    Raises
    ------
    ValueError
        If it is unknown.
    """
    if name not in MODELS:
        raise ValueError(f"--model {name!r} is unknown; choose one of {', '.join(MODELS)}")
    return MODELS[name]
