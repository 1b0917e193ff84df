"""Which kernel serves a GPU, and why the others do not; a GPU is only pretended, for the refusals alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fcp.runtime.kernels import Kernel, Request, select_kernel
from megatron_fcp.runtime.kernels.flash_attn_2 import FlashAttention2
from megatron_fcp.runtime.kernels.flash_attn_3 import FlashAttention3
from megatron_fcp.runtime.kernels.packages import Package, PackagedKernel, version_key
from megatron_fcp.runtime.kernels.registry import BY_NAME_ONLY, KERNELS
from megatron_fcp.runtime.kernels.torch_cuda_flash import TorchCudaFlash
from megatron_fcp.runtime.kernels.transformer_engine import TransformerEngine
from megatron_fcp.testing.kernel_standins import stand_in

pytestmark = pytest.mark.runtime


def cuda_request(**changes: Any) -> Request:
    return dataclasses.replace(Request(torch.device("cuda"), torch.bfloat16, 128, 128, 8, 2), **changes)


def test_a_cpu_is_refused_without_importing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackagedKernel, "_find", lambda self: pytest.fail(f"{self.distribution} was looked for"))
    for kernel in KERNELS:
        if isinstance(kernel, (PackagedKernel, TorchCudaFlash)):
            assert kernel.refusal(cuda_request(device=torch.device("cpu"))) == "runs on CUDA tensors, not on cpu"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Pretends that a GPU of some compute capability is there; only refusals look at it."""

    def pretend(major: int, minor: int, cudnn: int = 92100) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    return pretend


def test_every_kernel_gives_its_reason(gpu: Callable[[int, int], None]) -> None:
    gpu(7, 5)
    with pytest.raises(ValueError, match=r"no fast attention kernel can do torch\.bfloat16 on cuda") as error:
        select_kernel(device="cuda", dtype=torch.bfloat16, head_dim_qk=64, head_dim_v=64, num_heads=8, num_kv_heads=2)
    for kernel in KERNELS:
        assert f"{kernel.name}: " in str(error.value)
    assert "flash-attn-3: needs compute capability 9.0, not 7.5" in str(error.value)


@pytest.mark.parametrize(
    ("capability", "installed", "dims", "chosen"),
    [
        ((9, 0), ("transformer-engine", "flash_attn_3", "flash-attn-4", "flash-attn"), (128, 128), "flash-attn-3"),
        ((9, 0), ("transformer-engine", "flash-attn-4", "flash-attn"), (128, 128), "flash-attn-4"),
        ((9, 0), ("transformer-engine", "flash-attn"), (192, 128), "flash-attn-2"),
        ((9, 0), (), (128, 128), "torch-cuda"),
        ((9, 0), ("flash_attn_3",), (256, 256), "torch-cuda"),
        ((10, 0), ("transformer-engine", "flash-attn-4"), (128, 128), "transformer-engine"),
        ((10, 0), ("flash-attn-4", "flash_attn_3"), (192, 128), "flash-attn-4"),
        ((8, 0), ("transformer-engine", "flash_attn_3", "flash-attn"), (64, 64), "flash-attn-2"),
    ],
)
def test_choice_by_capability(
    gpu: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    installed: tuple[str, ...],
    dims: tuple[int, int],
    chosen: str,
) -> None:
    gpu(*capability)
    for kernel in KERNELS:
        if isinstance(kernel, PackagedKernel):
            there = kernel.distribution in installed
            found = stand_in(kernel.distribution, kernel.newest) if there else f"{kernel.distribution} is not here"
            monkeypatch.setattr(kernel, "_package", found)
    kernel, reason = select_kernel(
        device="cuda", dtype=torch.bfloat16, head_dim_qk=dims[0], head_dim_v=dims[1], num_heads=8, num_kv_heads=2
    )
    assert kernel.name == chosen
    assert kernel.name not in BY_NAME_ONLY
    for better in [k.name for k in KERNELS][: [k.name for k in KERNELS].index(chosen)]:
        assert f"{better}: " in reason


def test_transformer_engine_on_hopper_is_not_deterministic(gpu: Callable[[int, int], None]) -> None:
    gpu(9, 0)
    package = stand_in("transformer-engine", "2.20.2")
    assert "quadratic" in (TransformerEngine(package).refusal(cuda_request()) or "")
    assert TransformerEngine(package, deterministic=False).refusal(cuda_request()) is None


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        (FlashAttention2, {"dtype": torch.float32}, "bfloat16 and float16"),
        (FlashAttention2, {"head_dim_v": 100}, "multiples of 8"),
        (FlashAttention2, {"head_dim_qk": 264}, "up to 256"),
        (FlashAttention3, {"head_dim_qk": 256, "head_dim_v": 256}, "up to 192"),
        (TorchCudaFlash, {"head_dim_qk": 12}, "multiples of 8"),
    ],
)
def test_shapes_that_a_kernel_lacks(
    gpu: Callable[[int, int], None], kernel: Callable[[], Kernel], changes: dict[str, Any], reason: str
) -> None:
    gpu(9, 0)
    assert reason in (kernel().refusal(cuda_request(**changes)) or "")


class Broken(FlashAttention2):
    def load(self) -> Package:
        raise OSError("libcudart.so.12: cannot open shared object file")


def test_a_package_that_does_not_load(gpu: Callable[[int, int], None]) -> None:
    gpu(9, 0)
    assert Broken().refusal(cuda_request()) == (
        "flash-attn cannot be imported (OSError: libcudart.so.12: cannot open shared object file)"
    )
    missing = FlashAttention2().refusal(cuda_request())
    assert missing is None or "flash-attn" in missing


class Renamed(FlashAttention2):
    def load(self) -> Package:
        known = stand_in("flash-attn", "2.8.3.post2")

        def renamed(q: Any, k: Any, v: Any, seqlens_q: Any) -> None: ...

        return dataclasses.replace(known, forward=renamed, version="2.9.0")


def test_a_release_with_other_arguments_is_refused(gpu: Callable[[int, int], None]) -> None:
    gpu(9, 0)
    reason = Renamed().refusal(cuda_request())
    assert reason is not None
    assert "flash-attn 2.9.0 is not the release known here: renamed has no argument cu_seqlens_q" in reason


def test_an_untested_release_warns(gpu: Callable[[int, int], None], recwarn: pytest.WarningsRecorder) -> None:
    gpu(9, 0)

    def adapter(version: str) -> FlashAttention2:
        class Installed(FlashAttention2):
            def load(self) -> Package:
                return dataclasses.replace(stand_in("flash-attn", "2.8.3.post2"), version=version)

        return Installed()

    for version in ("2.7.0.post2", "2.7.4.post1", "2.8.3.post2+cu12torch2.8"):
        assert adapter(version).refusal(cuda_request()) is None
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"flash-attn 2.9.1 is not among .*2.7.0.post2 to 2.8.3.post2"):
        assert adapter("2.9.1").refusal(cuda_request()) is None


def test_order_of_releases() -> None:
    ordered = ["2.7.0", "2.7.0.post2", "2.8.0rc1", "2.8.0", "2.8.3.post2", "2.20.2", "4.0.0b3", "4.0.0b36", "4.0.0"]
    assert sorted(ordered[::-1], key=version_key) == ordered
    assert version_key("2.9.0+cu12") == version_key("2.9.0")
    assert version_key("unknown") < version_key("0.0.1")
