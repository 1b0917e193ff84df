"""Dropout, biases and kernels that a path cannot do are ignored in silence; here they are refused by name.

https://github.com/zhuzilin/ring-flash-attention/issues/35, https://github.com/zhuzilin/ring-flash-attention/issues/36
"""

from __future__ import annotations

from typing import Any

import pytest
from test_fcp_refusals import messages

from megatron_fcp.testing.loop import TrainingLoop

pytestmark = pytest.mark.megatron


def refusals(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Runs in a rank: what the command line is told."""
    return messages(cases)


def test_the_command_line_is_refused_by_flag_and_value(training_loop: TrainingLoop) -> None:
    cases = [
        ({"attention_dropout": 0.1}, ("--attention-dropout 0.1", "pass --attention-dropout 0")),
        ({"position_embedding_type": "relative"}, ("--position-embedding-type relative", "adds a bias", "use rope")),
        ({"cuda_graph_impl": "local"}, ("--cuda-graph-impl local", "every batch has a plan of its own", "pass none")),
    ]
    found = training_loop.call("test_22_what_a_path_cannot_do:refusals", [case for case, _ in cases] + [{}])
    assert found.pop() == [], "what works is not refused"
    for (_, words), texts in zip(cases, found, strict=True):
        assert len(texts) == 1
        for word in words:
            assert word in texts[0]


def calls(_: None) -> list[str]:
    """Runs in a rank: what attention says to arguments that it would have to ignore."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_fcp.integration.core_attention import FcpCoreAttention

    q = torch.zeros(4, 1, 2, 8)
    said = []
    for given in (
        {"attention_bias": torch.zeros(1)},
        {"attn_mask_type": AttnMaskType.no_mask},
        {"attn_mask_type": AttnMaskType.arbitrary},
    ):
        with pytest.raises(ValueError) as caught:
            FcpCoreAttention.forward(None, q, q, q, **given)  # type: ignore[arg-type]
        said.append(str(caught.value))
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.1)
    with pytest.raises(ValueError) as caught:
        FcpCoreAttention(config, 1, AttnMaskType.causal, "self")
    return [*said, str(caught.value)]


def test_arguments_of_a_call_are_refused_not_ignored(training_loop: TrainingLoop) -> None:
    bias, no_mask, arbitrary, dropout = training_loop.call("test_22_what_a_path_cannot_do:calls", None)
    assert bias.startswith("attention_bias is not supported")
    assert "no_mask is not supported" in no_mask
    assert "arbitrary is not supported" in arbitrary
    assert dropout.startswith("attention_dropout 0.1 is not supported")


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("flash-attn-2", {}, ("flash-attn-2",)),
        ("transformer-engine", {}, ("transformer-engine",)),
        ("cudnn9", {}, ("--fcp-kernel 'cudnn9'", "auto")),
    ],
)
def test_a_kernel_that_cannot_serve_is_named(name: str, given: dict[str, Any], words: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    from megatron_fcp.runtime import select_kernel

    asked = {"dtype": torch.bfloat16, "head_dim_qk": 64, "head_dim_v": 64, "num_heads": 4, "num_kv_heads": 2}
    with pytest.raises(ValueError) as caught:
        select_kernel(name, device="cpu", **{**asked, **given})
    for word in words:
        assert word in str(caught.value)
