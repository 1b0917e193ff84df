"""A CUDA-shaped surface over CPU torch: what Megatron calls on ``torch.cuda`` and with ``device="cuda"``.

Megatron asks for the current device, streams, events, memory figures and a CUDA random generator everywhere, and
creates tensors with ``device=torch.cuda.current_device()``. Everything here answers such calls on the CPU: streams and
events do nothing (the CPU executes in program order), the CPU generator plays the CUDA generator, and a device that
names CUDA means the CPU. Nothing is patched at import: :func:`megatron_fcp.testing.cpu_platform.install` calls
:func:`fake_cuda`, once per process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["fake_cuda"]

_CPU = torch.device("cpu")

# Functions that make a tensor on the device named by their ``device`` keyword.
_FACTORIES = (
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like", "randint_like", "tril_indices", "triu_indices"),
)
_NEW_METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_LEGACY_TYPES = (
    *("FloatTensor", "HalfTensor", "BFloat16Tensor", "DoubleTensor", "LongTensor", "IntTensor", "ShortTensor"),
    *("CharTensor", "ByteTensor", "BoolTensor"),
)


def fake_cuda() -> None:
    """Replace the CUDA surface of torch in this process by one that runs on the CPU."""
    _fake_devices()
    _fake_streams()
    _fake_memory()
    _fake_random()
    _fake_accelerator()
    _map_device_arguments()
    _map_backends()
    _skip_compilation()


def _answer(owner: Any, value: Any, *names: str) -> None:
    """Make each ``owner.<name>`` a function that ignores its arguments and returns `value`.

    Every name gets a function object of its own: ``torch._dynamo`` refuses to trace through one object known under
    two names.
    """
    for name in names:
        setattr(owner, name, (lambda result: lambda *args, **kwargs: result)(value))


def _fake_devices() -> None:
    """Device discovery: one device, number 0, new enough for Megatron's architecture checks."""
    # megatron/training/arguments.py asks for this under tensor or context parallelism on such a device.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda: Any = torch.cuda
    _answer(cuda, True, "is_available", "is_initialized", "is_bf16_supported")
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _answer(cuda, 0, "current_device")
    _answer(cuda, None, "set_device", "_lazy_init", "init")
    _answer(cuda, False, "is_current_stream_capturing")
    _answer(cuda, "CPU standing in for CUDA", "get_device_name")
    _answer(cuda, (8, 0), "get_device_capability")
    properties = types.SimpleNamespace(
        name="CPU standing in for CUDA", major=8, minor=0, total_memory=16 << 30, multi_processor_count=1
    )
    _answer(cuda, properties, "get_device_properties")
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.device = _DeviceContext
    for name in _LEGACY_TYPES:  # isinstance() checks of megatron/core/transformer/module.py
        setattr(cuda, name, getattr(torch, name))


class _DeviceContext(contextlib.nullcontext):
    """``with torch.cuda.device(i)``: there is one device, so nothing changes."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.idx = 0


class _Event:
    """An event that has always happened; remembers when it was recorded for ``elapsed_time`` (milliseconds)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _Event) -> float:
        return (end_event._recorded - self._recorded) * 1e3


class _Stream:
    """A stream whose work is done as soon as it is issued, because the CPU runs in program order."""

    cuda_stream = 0
    stream_id = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = _Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


def _fake_streams() -> None:
    """Streams, events, profiler ranges and the runtime handle: all of them do nothing."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.ExternalStream = _Stream
    cuda.Event = _Event
    _answer(cuda, _Stream(), "current_stream", "default_stream")
    _answer(cuda, contextlib.nullcontext(), "stream")
    _answer(cuda, None, "set_stream", "synchronize", "ipc_collect", "check_error")
    _answer(cuda.nvtx, None, "range_push", "range_pop", "mark")
    _answer(cuda.nvtx, contextlib.nullcontext(), "range")
    runtime = types.SimpleNamespace()
    _answer(runtime, 0, "cudaProfilerStart", "cudaProfilerStop")
    _answer(cuda, runtime, "cudart")


def _fake_memory() -> None:
    """Memory figures are zero: the CPU allocator keeps none, and a made-up number would be worse than none."""
    cuda: Any = torch.cuda
    _answer(cuda, None, "empty_cache", "reset_peak_memory_stats")
    _answer(cuda, 0, "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    _answer(cuda, 0, "device_memory_used", "utilization", "temperature", "power_draw", "clock_rate")
    _answer(cuda, collections.defaultdict(int), "memory_stats")
    _answer(cuda, (8 << 30, 16 << 30), "mem_get_info")


def _fake_random() -> None:
    """The CPU generator is the CUDA generator: operations on CPU tensors draw from no other."""
    cuda: Any = torch.cuda
    generator = torch.default_generator
    cuda.default_generators = (generator,) * 8
    for module in (cuda, cuda.random):
        module.get_rng_state = (lambda: lambda device="cuda": torch.get_rng_state())()
        module.set_rng_state = (lambda: lambda state, device="cuda": torch.set_rng_state(state))()
        module.manual_seed = (lambda: lambda seed: generator.manual_seed(int(seed)))()
        _answer(module, None, "manual_seed_all")
    cuda.initial_seed = lambda: generator.initial_seed()
    # CudaRNGStatesTracker.fork warns when the CPU generator moved inside; here it moves by construction.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _fake_accelerator() -> None:
    """A CUDA build of torch names CUDA as the accelerator although no driver is there; say that there is none.

    Used by ``DataLoader`` (memory pinning) and the autograd engine's stream handling in Python.
    """
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    _answer(accelerator, False, "is_available")
    _answer(accelerator, 0, "current_device_index", "current_device_idx")
    _answer(accelerator, None, "synchronize")


def _names_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory so that a CUDA ``device`` means the CPU and ``pin_memory`` is dropped."""

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return factory


def _map_device_arguments() -> None:
    """Let every device argument that names CUDA mean the CPU.

    Plain wrappers and not a ``TorchFunctionMode``: ``Tensor.backward`` is itself a torch function, so a mode would be
    popped while custom autograd functions run their backward.
    """
    tensor: Any = torch.Tensor
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW_METHODS:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    original_to, original_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)) and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # megatron/core/optimizer/{optimizer,distrib_optimizer,clip_grads}.py compare with "torch.cuda.FloatTensor".
        result = original_type(self, *args, **kwargs)
        return result if args or kwargs else result.replace("torch.", "torch.cuda.", 1)

    tensor.to, tensor.type = to, type_
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args, **kwargs: None


def _map_backends() -> None:
    """``nccl`` means ``gloo``. gloo does what Megatron needs of NCCL, except sending to oneself."""

    def over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def create(*args: Any, **kwargs: Any) -> Any:
            if "nccl" in str(kwargs.get("backend") or ""):
                kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            kwargs.pop("pg_options", None)
            return function(*args, **kwargs)

        return create

    dist.new_group = over_gloo(dist.new_group)
    dist.init_process_group = over_gloo(dist.init_process_group)


def _skip_compilation() -> None:
    """``torch.compile`` leaves a function as it is: ``@jit_fuser`` (megatron/core/jit.py) is torch.compile, whose first
    use imports torch._dynamo (seconds per process) and needs a C++ compiler."""

    def compile_(model: Any = None, **kwargs: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = compile_
