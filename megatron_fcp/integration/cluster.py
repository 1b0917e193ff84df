"""Which cluster plans are made for: the one that the user names, or on GPUs the preset nearest to theirs.

A plan made for another cluster of its kind is worth nearly as much as one made for its own (an A100 cluster by
``h100-ib``: within 0.02 of the kernels' speed), and several times one that knows of no network.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace

import torch

from megatron_fcp.config import NO_HARDWARE, NOT_WITH_HARDWARE
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.simulate.hardware import AttentionShape, HardwareModel, load_hardware

_BY_GPU = (("B200", "b200-nvl72"), ("B300", "b200-nvl72"), ("H200", "h200-ib"), ("", "h100-ib"))
_WHOLE_RACKS = ("GB200", "GB300")  # whose fast network reaches beyond the GPUs of a process's host
GPUS_OF_A_HOST = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")  # as torchrun and Slurm tell their processes


def device_of(args: Namespace) -> torch.device:
    """Where this rank computes; a tensor tells where "cuda" is: on the CPU platform it is the CPU."""
    return torch.empty(0, device=f"cuda:{args.local_rank}" if torch.cuda.is_available() else "cpu").device


def kv_heads_of(args: Namespace) -> int:
    """KV heads of the model's attention, multi-latent attention apart."""
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def gpu_name(args: Namespace) -> str | None:
    """Name of this rank's GPU, such as "NVIDIA H100 80GB HBM3"; None on CPUs."""
    device = device_of(args)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def preset_of(gpu: str) -> str:
    """The preset nearest to a GPU of that name."""
    return next(preset for part, preset in _BY_GPU if part in gpu)


def is_chosen(args: Namespace) -> bool:
    """Whether the cluster is left to the GPU: nothing on the command line says what plans are made for, or how."""
    said = ("hardware", "config", *NOT_WITH_HARDWARE)
    return all(getattr(args, f"fcp_{name}") is None for name in said)


def cluster_of(args: Namespace) -> HardwareModel | None:
    """The hardware of ``--fcp-hardware``, or that of this rank's GPU where nothing else is said; None: none.

    Raises
    ------
    ValueError
        For a name that is no preset, or a file that cannot be read.
    """
    if args.fcp_hardware == NO_HARDWARE:
        return None
    if args.fcp_hardware:
        try:
            return load_hardware(args.fcp_hardware)
        except ValueError as error:
            text = f"--fcp-hardware: {error}".replace("--fcp-hardware: --hardware", "--fcp-hardware")
            raise ValueError(text) from error
    gpu = gpu_name(args) if is_chosen(args) else None
    if gpu is None:
        return None
    model = load_hardware(preset_of(gpu))
    told = next((value for name in GPUS_OF_A_HOST if (value := os.environ.get(name, "")).isdigit()), "")
    if told and not any(rack in gpu for rack in _WHOLE_RACKS):
        model = replace(model, ranks_per_node=max(int(told), 1))
    return model


def prices(hardware: HardwareModel, args: Namespace) -> CostModel:
    """What ``hardware`` takes for the heads that one rank holds; tensor-parallel ranks take their places in a node."""
    tensor = args.tensor_model_parallel_size
    shape = AttentionShape(
        num_heads=max(args.num_attention_heads // tensor, 1),
        num_kv_heads=max(kv_heads_of(args) // tensor, 1),
        head_dim=args.kv_channels,
        bytes_per_element=2 if args.bf16 or args.fp16 else 4,
    )
    cost = hardware.cost(shape)
    return replace(cost, ranks_per_node=max(cost.ranks_per_node // tensor, 1))
