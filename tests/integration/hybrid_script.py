"""The example's training script with a hybrid model: Megatron's HybridModel in place of its GPTModel."""

from __future__ import annotations

import runpy
from pathlib import Path

example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"))

from megatron.core.enums import ModelType  # noqa: E402  after the example has registered FCP
from megatron.training import pretrain  # noqa: E402
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    pretrain(config, example["datasets_provider"], ModelType.encoder_or_decoder, example["forward_step"])
