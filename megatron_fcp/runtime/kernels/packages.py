"""Optional packages of kernels: found when first asked for, refused with a reason, warned about when unknown."""

from __future__ import annotations

import inspect
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_fcp.runtime.kernels.base import Request
from megatron_fcp.runtime.kernels.varlen import VarlenKernel


@dataclass(frozen=True)
class Package:
    """What an adapter uses of a package.

    Attributes
    ----------
    version : str
    forward, backward : callable
        Called by keyword.
    constants : dict
        Values that the calls need, such as enum members.
    """

    version: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    constants: dict[str, Any] = field(default_factory=dict)


class PackagedKernel(VarlenKernel):
    """A kernel of an optional package.

    Parameters
    ----------
    package : Package, optional
        Stands in for the installed one; tests use it.

    Attributes
    ----------
    distribution : str
        Name on the package index.
    oldest, newest : str
        Releases whose source the calls were checked against.
    """

    distribution: str
    oldest: str
    newest: str

    def __init__(self, package: Package | None = None) -> None:
        self._package: Package | str | None = package  # a str says why there is none

    @abstractmethod
    def load(self) -> Package:
        """Import the package.

        Raises
        ------
        Exception
            Of any kind: compiled packages fail to load in many ways.
        """

    @abstractmethod
    def refuse_shape(self, request: Request, capability: tuple[int, int]) -> str | None:
        """Why the kernel cannot do ``request`` on a GPU of this compute capability."""

    def refuse_package(self, package: Package) -> str | None:
        """Why this release cannot be driven."""
        return None

    def refusal(self, request: Request) -> str | None:
        reason = refuse_device(request)
        if reason is None:
            reason = self.refuse_shape(request, torch.cuda.get_device_capability(request.device))
        if reason is None:
            package = self._find()
            reason = package if isinstance(package, str) else None
        return reason

    @property
    def package(self) -> Package:
        """The package in use."""
        found = self._find()
        assert isinstance(found, Package), found
        return found

    def _find(self) -> Package | str:
        if self._package is None:
            try:
                self._package = self.load()
            except Exception as error:  # a broken build raises whatever its loader raises
                self._package = f"{self.distribution} cannot be imported ({type(error).__name__}: {error})"
            else:
                reason = self.refuse_package(self._package)
                if reason is None:
                    warn_if_untested(self.distribution, self._package.version, self.oldest, self.newest)
                else:
                    self._package = f"{self.distribution} {self._package.version} {reason}"
        return self._package


def refuse_device(request: Request) -> str | None:
    """Why a CUDA kernel of 16-bit floats cannot serve ``request``, as far as device and dtype go."""
    if request.device.type != "cuda":
        return f"runs on CUDA tensors, not on {request.device.type}"
    if not torch.cuda.is_available():
        return "there is no CUDA device here"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"knows bfloat16 and float16, not {request.dtype}"
    return None


def refuse_dims(request: Request, largest: int) -> str | None:
    """Why head dims do not fit a kernel that wants multiples of 8 up to ``largest``."""
    for dim in (request.head_dim_qk, request.head_dim_v):
        if dim % 8 or not 8 <= dim <= largest:
            return f"head dims must be multiples of 8 up to {largest}, not {request.head_dim_qk}/{request.head_dim_v}"
    return None


def parameters(function: Callable[..., Any]) -> inspect.Signature:
    """Signature of a package's function, looking through ``torch.library.custom_op``."""
    return inspect.signature(getattr(function, "_init_fn", function))


def refuse_names(package: Package, forward: Sequence[str], backward: Sequence[str]) -> str | None:
    """Why a release cannot be called by these argument names."""
    for function, names in ((package.forward, forward), (package.backward, backward)):
        missing = [name for name in names if name not in parameters(function).parameters]
        if missing:
            called = getattr(function, "__name__", "a function")
            return f"is not the release known here: {called} has no argument {', '.join(missing)}"
    return None


_VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:\.?(a|b|rc|dev|post)\.?(\d+))?")


def version_key(version: str) -> tuple[tuple[int, ...], int, int]:
    """Sorts releases: 4.0.0b3 < 4.0.0b36 < 4.0.0 < 4.0.0.post1; local parts (+cu12) do not count.

    >>> sorted(["2.8.0", "2.7.0.post2", "2.7.0", "4.0.0b36", "4.0.0b3"], key=version_key)
    ['2.7.0', '2.7.0.post2', '2.8.0', '4.0.0b3', '4.0.0b36']
    """
    match = _VERSION.match(version)
    if match is None:
        return (0,), 0, 0
    numbers = [int(n) for n in match[1].split(".")]
    stage = 0 if match[2] is None else 1 if match[2] == "post" else -1
    return tuple([*numbers, 0, 0, 0][:4]), stage, int(match[3] or 0)


def warn_if_untested(distribution: str, version: str, oldest: str, newest: str) -> None:
    """Warn of a release outside the range whose source was read."""
    if not version_key(oldest) <= version_key(version) <= version_key(newest):
        warnings.warn(
            f"{distribution} {version} is not among the releases that FCP's calls were checked against "
            f"({oldest} to {newest}); install one of those if results or errors look odd",
            stacklevel=2,
        )
