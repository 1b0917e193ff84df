"""Sliding windows and attention sinks in the real training loop.

The reference is Megatron's own local attention on one rank, which knows windows and sinks of whole samples. It drops
document boundaries where a layer has a window, so with documents the reference is FCP's attention on one rank; that one
is compared with Megatron's here as well.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from fcp_runs import EOD, LAYOUTS, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.testing.loop import TrainingLoop, TrainingResult, compare

pytestmark = pytest.mark.megatron

WINDOW = {"window_size": "20,0"}
RAISED = {"before": ("test_fcp_windows:raise_sinks",)}
# Flags that decide on the weights, and others.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all layers, off-by-one softmax": ({}, {**WINDOW, "softmax_type": "off-by-one"}),
    "every other layer, learnable sinks": (
        {"softmax_type": "learnable"},
        {**WINDOW, "window_attn_skip_freq": 2, **RAISED},
    ),
}
ROWS = {
    "all layers, off-by-one softmax": ("sliding window", "off-by-one softmax"),
    "every other layer, learnable sinks": ("sliding window in some layers", "learnable sinks"),
}
CASES = [
    pytest.param(kind, layout, marks=pytest.mark.feature(*(f"Attention: {row}" for row in ROWS[kind])))
    for kind in KINDS
    for layout in LAYOUTS
]
DOCUMENTS = {**WINDOW, "window_attn_skip_freq": "[1,0]", **RAISED, **EOD}
SINKS = {"softmax_type": "learnable"}


def raise_sinks() -> None:
    """Runs in the ranks: sinks of +5 and more, head by head, in place of the tiny ones that a model starts with."""
    import torch
    from megatron.core import parallel_state
    from megatron.training import training

    original = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        found = 0
        for chunk in result[0]:
            for name, parameter in chunk.named_parameters():
                if name.endswith("core_attention.softmax_offset"):
                    first = parallel_state.get_tensor_model_parallel_rank() * parameter.numel()
                    heads = torch.arange(first, first + parameter.numel())
                    parameter.data.copy_(5 + heads / 2)
                    found += 1
        assert found, "no layer has a learnable sink"
        return result

    training.setup_model_and_optimizer = setup_model_and_optimizer


def assert_equal(result: TrainingResult, reference: TrainingResult) -> None:
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_whole_samples_equal_megatrons_own_attention(runs: Runs, kind: str, layout: str) -> None:
    model, flags = KINDS[kind]
    assert_equal(runs(2, model, **fcp(layout), **flags), runs(model=model, **flags))


def test_windows_and_sinks_matter(runs: Runs) -> None:
    """What the comparisons rest on: without the window, or without the sinks, gradients are others."""
    windowed = runs(**WINDOW)
    assert largest_difference(windowed, runs()) > 1e-3
    for model, flags in KINDS.values():
        assert largest_difference(runs(model=model, **flags), windowed) > 1e-3


def largest_difference(result: TrainingResult, reference: TrainingResult) -> float:
    """Largest relative difference of the gradients that the reference has."""
    return max(
        float(abs(result.gradients[name] - want).max() / abs(want).max()) for name, want in reference.gradients.items()
    )


@pytest.mark.feature("Attention: sliding window and learnable sinks, documents")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_equal_one_rank(runs: Runs, layout: str) -> None:
    reference = runs(model=SINKS, context_parallel_backend="fcp", **DOCUMENTS)
    assert_equal(runs(2, SINKS, **fcp(layout), **DOCUMENTS), reference)
    offsets = [g for name, g in reference.gradients.items() if name.endswith("softmax_offset")]
    assert offsets
    assert all(abs(g).max() > 1e-6 for g in offsets), "the sinks have no gradient to compare"


def test_sinks_are_cut_over_tensor_parallel_ranks(runs: Runs) -> None:
    reference = runs(model=SINKS, context_parallel_backend="fcp", **DOCUMENTS)
    result = runs(4, SINKS, **fcp("resident"), **SPLIT_TENSORS, **DOCUMENTS)
    assert_equal(result, reference)
    assert result.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)  # each rank's sinks count


SAVED = {"ckpt_format": "torch_dist", "train_iters": 4, "global_batch_size": 2, **WINDOW, "window_attn_skip_freq": 2}
HALF = {"exit_interval": 2, "save_interval": 2}


@pytest.mark.parametrize(
    "first", ["native", pytest.param("fcp", marks=pytest.mark.nightly(seconds=15))], ids=lambda name: f"{name} first"
)
def test_sinks_go_from_one_backend_to_the_other(runs: Runs, tmp_path: Path, first: str) -> None:
    """Saved by one, resumed by the other, which would start with sinks near zero: the losses are those of one run."""
    whole = runs(model=SINKS, **SAVED, **RAISED)
    parts: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, fcp("resident"))]
    (ranks, before), (more_ranks, after) = parts if first == "native" else parts[::-1]
    saved = runs(ranks, SINKS, **before, **SAVED, **RAISED, **HALF, save=tmp_path / "half")
    resumed = runs(more_ranks, SINKS, **after, **SAVED, load=tmp_path / "half")
    assert [*saved.losses, *resumed.losses] == pytest.approx(whole.losses, rel=1e-5)


def windows_of(cases: list[dict[str, Any]]) -> list[Any]:
    """Runs in a rank: this package's reading of the flags beside Megatron's own."""
    from megatron.core.transformer.utils import is_layer_window_attention

    from megatron_fcp.integration.windows import layer_window, model_windows

    out = []
    for case in cases:
        args = Namespace(num_layers=6, mtp_num_layers=None, **case)
        ours = [layer_window(args, layer) for layer in range(1, 7)]
        theirs = [
            is_layer_window_attention(args.window_size, args.window_attn_skip_freq, layer) for layer in range(1, 7)
        ]
        out.append((ours, theirs, model_windows(args)))
    return out


def test_flags_mean_what_they_mean_to_megatron(training_loop: TrainingLoop) -> None:
    patterns = [None, 1, 2, 3, [1, 0, 0, 1, 1, 0], [1] * 6, [0] * 6]
    cases = [{"window_size": size, "window_attn_skip_freq": p} for size in (None, (7, 0), (0, 0)) for p in patterns]
    placed = set()
    for case, (ours, theirs, windows) in zip(cases, training_loop.call("test_fcp_windows:windows_of", cases)):
        assert [window is not None for window in ours] == theirs, case
        assert set(ours) == set(windows)
        assert windows[0] is None or windows == (windows[0],)  # whole documents come first
        placed.add(windows)
    assert placed == {(None,), (7,), (0,), (None, 7), (None, 0)}
    unlimited = {"window_size": (-1, 0), "window_attn_skip_freq": None}
    ((ours, _, _),) = training_loop.call("test_fcp_windows:windows_of", [unlimited])
    assert ours == [None] * 6
