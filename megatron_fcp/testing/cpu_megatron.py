"""What megatron-core 0.16 to 0.20 cannot do without a GPU, Transformer Engine or Apex, and how each gap is closed.

:data:`GAPS` is the list, in the order in which they are closed: a name, the file of Megatron, the reason and the
function that closes it. Closing imports Megatron, so :func:`megatron_fcp.testing.cpu_torch.fake_cuda` must have run
before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["GAPS", "Gap", "close_gaps"]


@dataclasses.dataclass(frozen=True)
class Gap:
    """One thing that Megatron cannot do on this platform by itself.

    Attributes
    ----------
    name : str
        Short name of the gap.
    where : str
        File of Megatron that has it.
    why : str
        What goes wrong, and with which part of a training run.
    close : callable
        Closes the gap in this process.
    """

    name: str
    where: str
    why: str
    close: Callable[[], None]


class _TritonStandIn(types.ModuleType):
    """A module whose every name is a decorator or call without effect: kernels get defined and are never run."""

    __version__ = "0.0.0"  # compared with releases by megatron/core/ssm

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorate


def _decorate(*args: Any, **kwargs: Any) -> Any:
    is_decorator = len(args) == 1 and callable(args[0]) and not kwargs
    return args[0] if is_decorator else _decorate


class _TritonFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``triton`` and everything below it as :class:`_TritonStandIn`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _TritonStandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _stand_in_for_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(_TritonFinder())


def _keep_built_dataset_helper() -> None:
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is None and not _borrow_dataset_helper(name):
        return
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


def _borrow_dataset_helper(name: str) -> bool:
    """Take the helper that an installed megatron-core has built, if it was built from the same source."""
    from megatron.core import datasets

    source = Path(datasets.__path__[0]) / "helpers.cpp"
    for folder in (Path(entry or ".") / "megatron" / "core" / "datasets" for entry in sys.path):
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            built, text = folder / f"helpers_cpp{suffix}", folder / "helpers.cpp"
            if not built.is_file() or not text.is_file() or text.read_bytes() != source.read_bytes():
                continue
            spec = importlib.util.spec_from_file_location(name, built)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            datasets.helpers_cpp = module  # type: ignore[attr-defined]
            return True
    return False


def _allow_sequence_parallel_norm() -> None:
    from megatron.core.transformer import torch_norm

    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
        assert not config.layernorm_zero_centered_gamma, "zero_centered_gamma needs Transformer Engine or Apex"
        assert not config.persist_layer_norm, "persist_layer_norm needs Apex; pass --no-persist-layer-norm"
        norm = kinds[config.normalization](normalized_shape=hidden_size, eps=eps)
        for parameter in norm.parameters():
            # finalize_model_grads sums the gradients of parameters with this mark over the tensor-parallel group.
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    wrapped: Any = torch_norm.WrappedTorchNorm
    wrapped.__new__ = new


def _treat_cpu_tensors_as_device_tensors() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _supply_zigzag_indices() -> None:
    from megatron.core import utils

    from megatron_fcp.plan.sharding import zigzag_per_document

    def thd_get_partitioned_indices(offsets: torch.Tensor, num_tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
        assert int(offsets[-1]) == num_tokens, (offsets, num_tokens)
        return torch.tensor(zigzag_per_document(offsets.numpy(), cp_size)[cp_rank], dtype=torch.int32)

    if utils.tex is None:
        utils.tex = types.SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)


def _know_no_inference_layers() -> None:
    from megatron.core.transformer import multi_token_prediction

    module: Any = multi_token_prediction
    if hasattr(module, "is_inference_column_parallel_linear"):
        module.is_inference_column_parallel_linear = lambda layer: False


def _fork_the_checkpoint_queue() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async, "get_write_results_queue"):
        original = filesystem_async.get_write_results_queue
        filesystem_async.get_write_results_queue = lambda mp_mode="fork": original(mp_mode)
        return
    older: Any = filesystem_async  # up to megatron-core 0.16
    queue: list[Any] = []

    def get_write_results_queue() -> Any:
        if not queue:
            queue.append(multiprocessing.get_context("fork").Manager().Queue())
        return queue[0]

    older._get_write_results_queue = get_write_results_queue


def _resume_distributed_optimizer() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    owner: Any = DistributedOptimizer
    sharded_state_dict = owner.sharded_state_dict
    load_state_dict = owner.load_state_dict
    set_states = owner._set_main_param_and_optimizer_states

    def with_allocated_state(self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        adam = self.optimizer
        if is_loading and isinstance(adam, torch.optim.Adam) and not adam.state:
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        return sharded_state_dict(self, model_state, is_loading, *args, **kwargs)

    def with_own_steps(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def without_step(self: Any, model_param: Any, tensors: Any) -> None:
        set_states(self, model_param, {**tensors, "step": None})

    owner.sharded_state_dict = with_allocated_state
    owner.load_state_dict = with_own_steps
    owner._set_main_param_and_optimizer_states = without_step


def _shard_on_the_cpu() -> None:
    from megatron.core.distributed import torch_fully_sharded_data_parallel as wrapper
    from torch.distributed.device_mesh import DeviceMesh

    def from_group(group: Any, device_type: str) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu")

    wrapper.DeviceMesh = types.SimpleNamespace(from_group=from_group)  # type: ignore[attr-defined,misc]


def _recompute_without_fp8() -> None:
    from megatron.core.tensor_parallel import random

    if not hasattr(random, "FP8GlobalStateManager"):
        names: Any = random
        names.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        names.fp8_autocast = names.activation_recompute_forward = lambda **unused: contextlib.nullcontext()


GAPS: tuple[Gap, ...] = (
    Gap(
        "triton",
        "megatron/core/transformer/moe/ops/paged_stash.py and other definitions of kernels",
        "triton comes with CUDA builds of torch only, and some modules import it unguarded to define kernels for GPUs",
        _stand_in_for_triton,
    ),
    Gap(
        "built dataset helper",
        "megatron/core/datasets/utils.py compile_helpers",
        "the wheel ships helpers_cpp built but no Makefile, and compile_helpers() runs make: every start would exit; a "
        "checkout has it the other way round, and building needs pybind11: an installed wheel's helper serves it",
        _keep_built_dataset_helper,
    ),
    Gap(
        "norm under sequence parallel",
        "megatron/core/transformer/torch_norm.py WrappedTorchNorm",
        "without Transformer Engine and Apex the norm is torch's own, which is refused under --sequence-parallel only "
        "because nobody marks its weights for the gradient all-reduce; here they are marked",
        _allow_sequence_parallel_norm,
    ),
    Gap(
        "counts on the host",
        "megatron/core/transformer/moe/moe_utils.py maybe_move_tensor_to_cpu",
        "the all-to-all dispatcher turns token counts into numpy only when the tensor is_cuda",
        _treat_cpu_tensors_as_device_tensors,
    ),
    Gap(
        "zig-zag indices",
        "megatron/core/utils.py _get_batch_on_this_cp_rank_per_document_balancing",
        "packed batches under context parallelism ask Transformer Engine for the indices of a rank's chunks",
        _supply_zigzag_indices,
    ),
    Gap(
        "inference layers",
        "megatron/core/tensor_parallel/inference_layers.py is_inference_column_parallel_linear",
        "multi-token prediction of 0.20 asks whether a layer is one of two kinds that do not exist without Transformer "
        "Engine, which isinstance() refuses",
        _know_no_inference_layers,
    ),
    Gap(
        "checkpoint queue",
        "megatron/core/dist_checkpointing/strategies/filesystem_async.py get_write_results_queue",
        "saving starts a helper process by spawn, which imports the training script again, there without this platform "
        "and for seconds; fork, which needs care only next to CUDA, does neither",
        _fork_the_checkpoint_queue,
    ),
    Gap(
        "resuming the distributed optimizer",
        "megatron/core/optimizer/distrib_optimizer.py DistributedOptimizer",
        "with torch's Adam in place of the fused ones, loading a --use-distributed-optimizer checkpoint fails in "
        "state_dict(), which wants a step number before there is any state; then every parameter is given one and the "
        "same step tensor, so that a step counts once per parameter; then the step is overwritten or asked for among "
        "the loaded tensors, and fp32 parameters are written to outside no_grad",
        _resume_distributed_optimizer,
    ),
    Gap(
        "mesh of FSDP2",
        "megatron/core/distributed/torch_fully_sharded_data_parallel.py TorchFullyShardedDataParallel",
        "its device mesh is a CUDA one, and torch's fully_shard asks where the parameters really are",
        _shard_on_the_cpu,
    ),
    Gap(
        "state of FP8 in recomputation",
        "megatron/core/tensor_parallel/random.py CheckpointWithoutOutput",
        "recomputation of norms, activations and MLA's up-projection asks Transformer Engine whether FP8 is on",
        _recompute_without_fp8,
    ),
)


def close_gaps() -> None:
    """Close every gap of :data:`GAPS` in this process."""
    for gap in GAPS:
        gap.close()
