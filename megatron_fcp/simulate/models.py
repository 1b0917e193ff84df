"""Sizes of models and how they are split over a rank, as far as a step's time and memory depend on them."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, fields

from megatron_fcp.config import check_at_least
from megatron_fcp.plan.blocks import check_window
from megatron_fcp.simulate.hardware import AttentionShape

MOST_LAYERS = 10_000  # of a pattern; more is a slip of the pen


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
    window : int or None
        Tokens before a query that it attends to at most (``--window-size W,0``), in the layers that have the window.
    window_skip_freq : int, tuple of int or None
        Which do, as ``--window-attn-skip-freq``: all (None); all but every ``N``-th; or those with a 1, layer by layer.

    Raises
    ------
    ValueError
        If the pattern is not one number per layer, or there is a pattern and no window.
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
    window: int | None = None
    window_skip_freq: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_window(self.window)
        skip = self.window_skip_freq
        if skip is None:
            return
        if self.window is None:
            raise ValueError(f"--window-attn-skip-freq {skip} has no window; pass one, or leave it out")
        if isinstance(skip, int):
            check_at_least("--window-attn-skip-freq", skip, 1)
        elif len(skip) != self.num_layers or not set(skip) <= {0, 1}:
            raise ValueError(
                f"--window-attn-skip-freq {list(skip)} must be one 0 or 1 for each of the {self.num_layers} layers"
            )

    def layer_window(self, layer: int) -> int | None:
        """Window of a layer, counted from 1; None: it sees whole documents."""
        skip = self.window_skip_freq
        if skip is None:
            return self.window
        windowed = layer % skip != 0 if isinstance(skip, int) else bool(skip[layer - 1])
        return self.window if windowed else None

    @property
    def layers_by_window(self) -> dict[int | None, int]:
        """How many layers there are of each window, first the kind that tokens are placed for."""
        count = Counter(self.layer_window(layer) for layer in range(1, self.num_layers + 1))
        return {window: count[window] for window in (None, self.window) if window in count}

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

    def layers_of_stages(self, model: ModelShape) -> list[list[int]]:
        """Layers (counted from 1) of every pipeline stage; an interleaved stage has parts of the model in turn."""
        slots = model.num_layers + self.embedding_as_layer + self.loss_as_layer
        out: list[list[int]] = [[] for _ in range(self.pipeline)]
        for layer in range(1, model.num_layers + 1):
            slot = layer - 1 + self.embedding_as_layer
            out[slot * self.pipeline * self.virtual // slots % self.pipeline].append(layer)
        return out

    def stage_layers(self, model: ModelShape) -> int:
        """Layers of the fullest pipeline stage."""
        counted = model.num_layers + self.embedding_as_layer + self.loss_as_layer
        return min(counted // self.pipeline, model.num_layers)


def parse_skip_freq(text: str) -> int | tuple[int, ...]:
    """``--window-attn-skip-freq`` as Megatron takes it: a number, or a list such as ``([1]*2+[0])*4``.

    Raises
    ------
    ValueError
        For anything else.
    """
    try:
        value = _list_expression(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, (int, tuple)) or (isinstance(value, int) and value < 1):
        raise ValueError(f"must be an integer of at least 1 or a list of 0 and 1 such as [1,1,0]*10, got {text!r:.40}")
    return value


def _list_expression(node: ast.expr) -> int | tuple[int, ...]:
    """Value of integers and lists of them, added and multiplied."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_list_expression(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return tuple(item for item in items if isinstance(item, int))
    if isinstance(node, ast.BinOp):
        left, right = _list_expression(node.left), _list_expression(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, tuple) and isinstance(right, tuple):
            return left + right
        if isinstance(node.op, ast.Mult):
            items, times = (left, right) if isinstance(left, tuple) else (right, left)
            if isinstance(items, tuple) and isinstance(times, int) and len(items) * times <= MOST_LAYERS:
                return items * times
    raise ValueError("not a list of integers")


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
