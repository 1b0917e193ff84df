"""What the Megatron at hand has and lacks, found by looking at it rather than by its version.

The places that FCP hooks, release by release, are in :mod:`megatron_fcp.integration.releases`; here are the flags and
the abilities of the data path.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

# Flags of later releases: what a release without them does.
_LATER_FLAGS: dict[str, Callable[[Namespace], Any]] = {
    "dataloader_inter_document_masking": lambda args: False,
    "eval_micro_batch_size": lambda args: args.micro_batch_size,
}


def version() -> tuple[str, str]:
    """Release ("0.19") and full version ("0.19.2") of megatron-core."""
    from megatron.core import package_info

    major, minor, patch, *suffix = package_info.VERSION
    return f"{major}.{minor}", f"{major}.{minor}.{patch}" + "".join(suffix)


def complete(args: Namespace) -> None:
    """Give parsed arguments the flags of later releases, with the values that say what this release does."""
    for name, value in _LATER_FLAGS.items():
        if not hasattr(args, name):
            setattr(args, name, value(args))
    if not hands_on_boundaries() and getattr(args, "fcp_plan_ahead", None) is None:
        args.fcp_plan_ahead = 0  # reading ahead was tried with the newer data path only


def hands_on_boundaries() -> bool:
    """Whether Megatron's data path hands the boundaries of pretraining batches to every rank (from 0.19 on).

    Before, FCP sends end-of-document boundaries to the tensor-parallel group itself
    (:mod:`megatron_fcp.integration.batch_older`), and middle pipeline stages, which read no data there, get none.
    """
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    return "inter_document_masking" in {field.name for field in dataclasses.fields(GPTDatasetConfig)}


def hands_on_packed_samples() -> bool:
    """Whether packed samples (``--sft``) reach every tensor-parallel rank whole (from 0.18 on)."""
    return _has("megatron.core.utils", "get_batch_on_this_tp_rank")


def builds_packed_params_everywhere() -> bool:
    """Whether middle pipeline stages get the boundaries of packed samples (from 0.17 on)."""
    return _has("megatron.core.packed_seq_params", "PackedSeqParams.__post_init__")


def builds_hybrid_stacks() -> bool:
    """Whether hybrid models come from ``HybridStack``, which FCP enters (from 0.18 on)."""
    return importlib.util.find_spec("megatron.core.models.hybrid") is not None


def _has(module: str, attribute: str) -> bool:
    owner: Any = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return name in vars(owner)


def refused(args: Namespace) -> Iterator[str]:
    """Error texts for what FCP does with later releases only, and for flags that only some releases have."""
    release = f"--context-parallel-backend fcp on megatron-core {version()[0]}"
    if getattr(args, "fcp_plan_ahead", 0) and not hands_on_boundaries():
        yield f"--fcp-plan-ahead {args.fcp_plan_ahead} needs megatron-core 0.19 or newer; drop it on {version()[0]}"
    if getattr(args, "mtp_hsm", False):
        yield (
            f"--mtp-hsm cannot be combined with {release}: it rolls hidden states by Megatron's own sharding; leave it "
            "off, or train this model with --context-parallel-backend native"
        )
    for name in ("hybrid_override_pattern", "hybrid_layer_pattern"):
        pattern = getattr(args, name, None)
        if pattern and not builds_hybrid_stacks():
            yield (
                f"--{name.replace('_', '-')} {pattern} cannot be combined with {release}: the specs of hybrid models "
                "name Transformer Engine's attention directly there; use --context-parallel-backend native for hybrid "
                "models, or megatron-core 0.18 or newer"
            )
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    if args.reset_attention_mask and not args.sft and not hands_on_boundaries() and (stages > 2 or virtual):
        flag = f"--pipeline-model-parallel-size {stages}" if stages > 2 else "virtual pipeline stages"
        yield (
            f"{flag} cannot be combined with --reset-attention-mask and {release}: only the first and the last stage "
            "read data there, and the others need its document boundaries as well; use two stages without virtual "
            "ones, or megatron-core 0.19"
        )
    if args.sft and not builds_packed_params_everywhere():
        yield (
            f"--sft cannot be combined with {release}: its own data path loses the boundaries of packed samples on "
            "the way to the model; use megatron-core 0.17 or newer"
        )
    elif args.sft and not hands_on_packed_samples() and args.tensor_model_parallel_size > 1:
        yield (
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} cannot be combined with --sft and "
            f"{release}: it does not send the longest document's length to all tensor-parallel ranks; use 1, or "
            "megatron-core 0.18 or newer"
        )
