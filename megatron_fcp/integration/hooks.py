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

from megatron_fcp.integration import features, session
from megatron_fcp.integration.arguments import wrap_add_megatron_arguments
from megatron_fcp.integration.releases import INSTALL, OTHER_FORMS, RELEASES, SOME_RELEASES
from megatron_fcp.integration.seams import SEAMS, Seam


@dataclass(frozen=True)
class _Hook:
    """A replacement in place."""

    seam: Seam
    owner: Any
    original: Callable[..., Any]
    replacement: Callable[..., Any]


_hooks: list[_Hook] = []
_by_launcher = False


class _OtherSeamError(Exception):
    """A place in Megatron is not as expected; says how."""


def register(*, launcher: bool = False, flags: bool = True) -> None:
    """Make Megatron know ``--context-parallel-backend`` in this process.

    Call it before Megatron parses its arguments. Names that a script has imported from Megatron before
    (``from megatron.core.utils import get_batch_on_this_cp_rank``) are replaced where they are.

    Parameters
    ----------
    launcher : bool
        Whether the call comes from ``python -m megatron_fcp.run``. A script's own call after it does nothing.
    flags : bool
        Whether Megatron's parser gets the flags from here; False where a source patch adds them.

    Raises
    ------
    RuntimeError
        If FCP is registered already, or Megatron is not a release whose seams are known; names release and seam.
    """
    global _by_launcher
    if _hooks:
        if _by_launcher and not launcher:
            return
        raise RuntimeError("megatron_fcp is registered already; call megatron_fcp.register() once per process")
    hooks = [  # complete before any is put in place
        _Hook(seam, owner, original, functools.update_wrapper(seam.wrap(original), original))
        for seam, owner, original in places()
        if seam.wrap is not None and (flags or seam.wrap is not wrap_add_megatron_arguments)
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


def adds_flags() -> bool:
    """Whether Megatron's parser gets FCP's flags from a hook."""
    return any(hook.seam.wrap is wrap_add_megatron_arguments for hook in _hooks)


def places() -> list[tuple[Seam, Any, Callable[..., Any]]]:
    """Every place where FCP enters this Megatron: the form it has here, what owns it, and its value.

    Raises
    ------
    RuntimeError
        If this is another Megatron than those known; names its version and every place that is different.
    """
    release, version = features.version()
    found: list[tuple[Seam, Any, Callable[..., Any]]] = []
    problems: list[str] = []
    for seam in (*SEAMS, *SOME_RELEASES):
        try:
            found.append(_find(seam))
        except _OtherSeamError as error:
            if seam in SEAMS or "is not there" not in str(error):
                problems.append(f"{seam.name} {error}. It is needed because: {seam.why}")
    if release not in RELEASES:
        different = "; ".join(problems) or f"the {len(found)} places it enters look familiar but were never tried there"
        raise RuntimeError(
            f"megatron_fcp knows megatron-core {RELEASES[0]} to {RELEASES[-1]}, and this is {version}: {different}. "
            f"Install {INSTALL} or a newer megatron_fcp"
        )
    if problems:
        raise RuntimeError(
            f"megatron-core {version} is not as megatron_fcp expects: {'; '.join(problems)}. "
            "Use a megatron_fcp made for this Megatron, or an unmodified release"
        )
    return found


def _find(seam: Seam) -> tuple[Seam, Any, Callable[..., Any]]:
    """The form that a place has here, its owner and its value."""
    others = OTHER_FORMS.get(seam.name, ())
    differences: list[str] = []
    for form in (seam, *others):
        try:
            return form, *_locate(form)
        except _OtherSeamError as error:
            differences.append(str(error))
    known = f" (nor is it one of the {len(others)} forms of other releases)" if others else ""
    raise _OtherSeamError(differences[0] + known)


def _locate(seam: Seam) -> tuple[Any, Callable[..., Any]]:
    """Owner and value of a seam, once it has proved to be the expected one."""
    try:
        owner: Any = importlib.import_module(seam.module)
        *path, name = seam.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        value = vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise _OtherSeamError(f"is not there ({error})") from error
    parameters = tuple(inspect.signature(value).parameters)
    if parameters != seam.parameters:
        raise _OtherSeamError(f"takes ({', '.join(parameters)}) instead of ({', '.join(seam.parameters)})")
    if seam.markers:
        source = inspect.getsource(value)
        for marker in seam.markers:
            if marker not in source:
                raise _OtherSeamError(f"does not contain {marker!r}")
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
