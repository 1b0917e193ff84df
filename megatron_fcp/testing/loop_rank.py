"""One rank of a training job (:mod:`megatron_fcp.testing.loop`): runs the script and records what it computes.

Recording wraps ``megatron.training.training.train_step`` in the forked process of the job; nothing else is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from megatron_fcp.testing import cpu_platform
from megatron_fcp.testing.corpus import CorpusSummary, build_corpus
from megatron_fcp.testing.gloo_pool import load_planner
from megatron_fcp.testing.loop import RankRecord, TrainingJob
from megatron_fcp.testing.pool import resolve

__all__ = ["note", "preload", "train", "write_corpus"]

# Megatron's loop and what it and PyTorch import late in every run.
_PRELOADED = (
    "megatron.training",
    "megatron.training.datasets.sft_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.tokenizers.text.models.default_tokenizer",
    "torch._dynamo",
)

_notes: dict[str, Any] = {}


def note(key: str, value: Any) -> None:
    """Leave something for the test: it appears in the ``notes`` of this rank's :class:`RankRecord`."""
    _notes[key] = value


def preload() -> None:
    """Import, in the server process, what every training job would import by itself otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every module of Megatron says that Transformer Engine is absent
        active = cpu_platform.install()
        for name in _PRELOADED:
            with contextlib.suppress(ModuleNotFoundError):  # releases differ in what they have
                importlib.import_module(name)
    load_planner()
    assert active, "the CPU platform is for machines without a GPU; hide it with CUDA_VISIBLE_DEVICES="


def train(argument: tuple[TrainingJob, int, int]) -> RankRecord:
    """Run a job's script as one rank.

    Parameters
    ----------
    argument : tuple
        The job, this rank and the port of the rendezvous.

    Returns
    -------
    RankRecord
    """
    job, rank, port = argument
    assert job.script is not None
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.argv = [job.script, *job.argv]
    record = RankRecord([], [], [], [], _notes)
    _record_steps(job, record)
    for name in job.before:
        resolve(name)()
    try:
        runpy.run_path(job.script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):  # Megatron leaves through sys.exit(0) at --exit-interval
            raise
    return record


def write_corpus(options: dict[str, Any]) -> CorpusSummary:
    """:func:`megatron_fcp.testing.corpus.build_corpus` in a process that has Megatron."""
    return build_corpus(**options)


def _record_steps(job: TrainingJob, record: RankRecord) -> None:
    """Wrap Megatron's ``train_step`` so that it fills `record`."""
    from megatron.training import get_args, training

    original: Callable[..., Any] = training.train_step

    def train_step(
        forward_step: Any, data_iterator: Any, model: list[Any], *args: Any, iteration: int = 0, **kwargs: Any
    ) -> Any:
        arguments: Any = get_args()
        if job.gradients and not record.losses:
            # Megatron's own switch: all-reduces gradients (the distributed optimizer only scatters them) and
            # calls save_grads between reduction and optimizer step.
            arguments.save_wgrads_interval = 1
            training.save_grads = lambda *unused: record.gradients.extend(_pieces(model, _gradient))
        result = original(forward_step, data_iterator, model, *args, iteration=iteration, **kwargs)
        arguments.save_wgrads_interval = None
        record.losses.append({name: float(value) for name, value in result[0].items()})
        record.grad_norms.append(float(result[5]))
        if job.parameters and iteration + 1 == arguments.train_iters:
            record.parameters.extend(_pieces(model, lambda parameter: parameter.data))
        return result

    training.train_step = train_step


def _gradient(parameter: Any) -> Any:
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def _pieces(model: list[Any], value_of: Callable[[Any], Any]) -> Iterator[tuple[Any, ...]]:
    """This rank's part of a quantity per parameter, placed by the sharding that Megatron's checkpoints use."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(model):
        parameters = {parameter.data_ptr(): parameter for parameter in chunk.parameters()}
        for entry in nested_values(chunk.sharded_state_dict()):
            if not isinstance(entry, (ShardedTensor, ShardedTensorFactory)) or entry.data is None:
                continue
            parameter = parameters.get(entry.data.data_ptr())
            if parameter is None or parameter.shape != entry.data.shape:
                continue  # a buffer
            value = value_of(parameter)
            assert isinstance(value, torch.Tensor), f"{entry.key} has no gradient"
            value = value.detach().float().clone()
            if isinstance(entry, ShardedTensorFactory):
                built = nested_values(dataclasses.replace(entry, data=value).build())
            else:
                built = [dataclasses.replace(entry, data=value, dtype=value.dtype)]
            for piece in built:
                if is_main_replica(piece.replica_id):
                    assert piece.data is not None
                    data = piece.data.contiguous().numpy()
                    yield piece.key, tuple(piece.global_shape), tuple(piece.global_offset), piece.prepend_axis_num, data
