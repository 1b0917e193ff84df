"""A user's training script: its own flags, batches from its own iterators, its own forward step.

Batches never see Megatron's data sets: every rank makes them from its data-parallel rank, documents of any length,
rows of different numbers of documents, and hands ``cu_seqlens`` on itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

import megatron_fcp

megatron_fcp.register()  # the names imported above follow


def add_own_flags(parser: Any) -> Any:
    group = parser.add_argument_group("this script's own")
    group.add_argument("--longest-document", type=int, required=True)
    group.add_argument("--broken-batch", type=int, default=None, help="number of the batch whose documents do not fit")
    return parser


def batches(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """One stream of documents per batch: the last one ends with the stream."""
    args = get_args()
    generator = torch.Generator().manual_seed(100 + rank)
    size = args.micro_batch_size * args.seq_length
    number = 0
    while True:
        number += 1
        stream = torch.randint(0, args.vocab_size, (size + 1,), generator=generator)
        lengths = torch.randint(1, args.longest_document + 1, (size,), generator=generator)
        ends = lengths.cumsum(0)
        ends = ends[ends < size]
        offsets = torch.cat([torch.tensor([0]), ends, torch.tensor([size])]).to(torch.int32)
        if number == args.broken_batch:
            offsets[-1] += args.seq_length
        positions = torch.cat([torch.arange(int(length)) for length in offsets.diff()])[:size]
        yield {
            "tokens": stream[None, :-1],
            "labels": stream[None, 1:],
            "loss_mask": torch.ones(1, size).index_fill_(1, ends - 1, 0),  # nothing follows a document's last token
            "position_ids": positions[None],
            "cu_seqlens": offsets,
        }


def datasets(num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Iterators in place of data sets: ``--dataloader-type external`` hands them on."""
    rank = mpu.get_data_parallel_rank()
    return batches(rank), batches(1000 + rank), None


datasets.is_distributed = True  # type: ignore[attr-defined]


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = torch.sum(output.view(-1).float() * mask.view(-1))
    count = mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count])}


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    offsets = batch["cu_seqlens"]
    batch = get_batch_on_this_cp_rank(batch, use_per_sequence_balancing=True)
    longest = int(offsets.diff().max())
    documents = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=documents)
    return output, functools.partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    arguments = parse_and_validate_args(extra_args_provider=add_own_flags)
    config = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
