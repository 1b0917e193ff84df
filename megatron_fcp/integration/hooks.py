"""Puts the replacements of :data:`megatron_fcp.integration.seams.SEAMS` in place, and takes them out again."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_fcp.integration import session
from megatron_fcp.integration.seams import SEAMS, SUPPORTED, Seam


@dataclass(frozen=True)
class _Hook:
    """A replacement in place."""

    seam: Seam
    owner: Any
    original: Callable[..., Any]
    replacement: Callable[..., Any]


_hooks: list[_Hook] = []
_by_launcher = False


def register(*, launcher: bool = False) -> None:
    """Make Megatron know ``--context-parallel-backend`` in this process.

    Call it before Megatron parses its arguments. Names that a script has imported from Megatron before
    (``from megatron.core.utils import get_batch_on_this_cp_rank``) are replaced where they are.

    Parameters
    ----------
    launcher : bool
        Whether the call comes from ``python -m megatron_fcp.run``. A script's own call after it does nothing.

    Raises
    ------
    RuntimeError
        If FCP is registered already, or Megatron is not the release whose seams are known; names release and seam.
    """
    global _by_launcher
    if _hooks:
        if _by_launcher and not launcher:
            return
        raise RuntimeError("megatron_fcp is registered already; call megatron_fcp.register() once per process")
    version = _check_version()
    places = [(seam, *_locate(seam, version)) for seam in SEAMS]
    hooks = [  # complete before any is put in place
        _Hook(seam, owner, original, functools.update_wrapper(seam.wrap(original), original))
        for seam, owner, original in places
        if seam.wrap is not None
    ]
    for hook in hooks:
        setattr(hook.owner, hook.seam.attribute.rpartition(".")[2], hook.replacement)
    _hooks.extend(hooks)
    _replace_aliases({id(hook.original): hook.replacement for hook in _hooks if isinstance(hook.owner, ModuleType)})
    _by_launcher = launcher


def unregister() -> None:
    """Put everything back as it was.

    Raises
    ------
    RuntimeError
        If FCP is not registered, or something else was installed on top of it since; names the seam.
    """
    if not _hooks:
        raise RuntimeError("megatron_fcp is not registered")
    for hook in _hooks:
        name = hook.seam.attribute.rpartition(".")[2]
        if vars(hook.owner).get(name) is not hook.replacement:
            raise RuntimeError(
                f"{hook.seam.name} was replaced again after megatron_fcp.register(); undo that replacement first"
            )
    for hook in _hooks:
        setattr(hook.owner, hook.seam.attribute.rpartition(".")[2], hook.original)
    _replace_aliases({id(hook.replacement): hook.original for hook in _hooks if isinstance(hook.owner, ModuleType)})
    _hooks.clear()
    session.end()


def is_registered() -> bool:
    """Whether FCP's hooks are in place."""
    return bool(_hooks)


def _check_version() -> str:
    from megatron.core import package_info

    version = ".".join(map(str, package_info.VERSION[:3])) + "".join(package_info.VERSION[3:])
    if tuple(package_info.VERSION[:2]) != SUPPORTED:
        supported = ".".join(map(str, SUPPORTED))
        raise RuntimeError(
            f"megatron_fcp knows the seams of megatron-core {supported}.x, and this is {version}; "
            f"install 'megatron-core>={supported},<{SUPPORTED[0]}.{SUPPORTED[1] + 1}'"
        )
    return version


def _locate(seam: Seam, version: str) -> tuple[Any, Callable[..., Any]]:
    """Owner and value of a seam, once it has proved to be the expected one."""

    def changed(how: str) -> RuntimeError:
        return RuntimeError(
            f"megatron-core {version} is not as megatron_fcp expects: {seam.name} {how}. It is needed because: "
            f"{seam.why}. Use a megatron_fcp made for this release, or an unmodified Megatron"
        )

    try:
        owner: Any = importlib.import_module(seam.module)
        *path, name = seam.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        value = vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise changed(f"is not there ({error})") from error
    parameters = tuple(inspect.signature(value).parameters)
    if parameters != seam.parameters:
        raise changed(f"takes ({', '.join(parameters)}) instead of ({', '.join(seam.parameters)})")
    if seam.markers:
        source = inspect.getsource(value)
        for marker in seam.markers:
            if marker not in source:
                raise changed(f"does not contain {marker!r}")
    return owner, value


def _replace_aliases(replacements: dict[int, Callable[..., Any]]) -> None:
    """Replace module-level names of any loaded module that are bound to one of the originals (by id)."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            replacement = replacements.get(id(value))
            if replacement is not None:
                names[name] = replacement
