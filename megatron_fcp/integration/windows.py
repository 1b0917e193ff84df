"""Which layers see whole documents and which a window, as Megatron's flags say it.

Placement is a batch's, windows are a layer's. Where any layer sees whole documents, tokens are placed for those: they
cost more, as the square of a document's length and not in proportion to it. Only where all layers have a window are
tokens placed for it. What balance that leaves to either kind: docs/architecture.md.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence


def window_of(window_size: Sequence[int] | None) -> int | None:
    """Tokens before its own that a query sees at most; None: all of its document.

    Parameters
    ----------
    window_size : (int, int) or None
        ``TransformerConfig.window_size``: tokens before and after, -1 for no limit.

    Raises
    ------
    ValueError
        Where a query would see tokens after it, or for numbers that mean nothing.
    """
    if not window_size:
        return None
    problem = window_problem(window_size)
    if problem is not None:
        raise ValueError(f"window_size {tuple(window_size)} is not supported by FCP's attention: {problem}")
    return None if window_size[0] < 0 else int(window_size[0])


def window_problem(window_size: Sequence[int]) -> str | None:
    """What is wrong with ``TransformerConfig.window_size`` for causal attention, and what to do."""
    sizes = tuple(window_size)
    if len(sizes) != 2 or min(sizes) < -1:
        return "it takes tokens before and after a query, each at least 0, or -1 for no limit; pass W,0"
    if sizes[1] > 0:
        return f"the mask is causal, and no query sees a token after it; pass {sizes[0]},0"
    if sizes[1] < 0 <= sizes[0]:
        return f"the mask is causal, which ends at the query itself; pass {sizes[0]},0"
    return None


def is_windowed(window_attn_skip_freq: int | Sequence[int] | None, layer_number: int) -> bool:
    """Whether a layer (counted from 1) has the window: Megatron's ``is_layer_window_attention``."""
    if window_attn_skip_freq is None:
        return True
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    return bool(window_attn_skip_freq[layer_number - 1])


def layer_window(config: object, layer_number: int) -> int | None:
    """Window of a layer (counted from 1) under a ``TransformerConfig`` or parsed arguments."""
    window = window_of(getattr(config, "window_size", None))
    if window is None or not is_windowed(getattr(config, "window_attn_skip_freq", None), layer_number):
        return None
    return window


def model_windows(args: Namespace) -> tuple[int | None, ...]:
    """Every window of the model's layers once, first the one that tokens are placed for."""
    pattern = args.window_attn_skip_freq
    layers = len(pattern) if isinstance(pattern, list) else args.num_layers + (args.mtp_num_layers or 0)
    windows = {layer_window(args, layer) for layer in range(1, layers + 1)}
    return tuple(sorted(windows, key=lambda window: -1 if window is None else window))
