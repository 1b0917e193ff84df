#!/usr/bin/env python3
"""Put FCP's source patch into a Megatron-LM, look whether it is there, or take it out again.

    python patches/apply.py apply  PATH
    python patches/apply.py check  PATH      exit status 0: patched, 1: not patched
    python patches/apply.py remove PATH

PATH holds ``megatron/``: a checkout of Megatron-LM, or the site-packages of an installed megatron-core. The patch of a
release (``patches/<release>/patch.toml``) says which lines go into which function; the place is found in the syntax
tree, so no line of Megatron is repeated here and unrelated changes do not matter. A file is replaced as a whole or not
at all, ``apply`` twice is once, and ``remove`` restores every byte. Needs Python 3.11 and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "  # megatron-fcp"
HERE = Path(__file__).resolve().parent


class PatchError(Exception):
    """Why nothing was changed."""


@dataclass(frozen=True)
class Insertion:
    """Lines for the end of one function.

    Attributes
    ----------
    file : str
        Path below PATH.
    function : str
        A module-level function.
    parameters : tuple of str
        The names it must have, in order; it must end with ``return`` of the first one.
    lines : tuple of str
        Go before that return, indented like it.
    """

    file: str
    function: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]


def read_patches(folder: Path = HERE) -> dict[str, Insertion]:
    """The patch of every release, by release ("0.19")."""
    patches: dict[str, Insertion] = {}
    for path in sorted(folder.glob("*/patch.toml")):
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        lines = tuple(values["lines"])
        insertion = Insertion(values["file"], values["function"], tuple(values["parameters"]), lines)
        patches[values["release"]] = insertion
    return patches


def release_of(root: Path) -> str:
    """Release of the megatron-core below ``root``."""
    path = root / "megatron" / "core" / "package_info.py"
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError) as error:
        raise PatchError(f"{root} is no Megatron-LM: {path} cannot be read ({error})") from error
    assigned = [(n.targets[0], n.value) for n in body if isinstance(n, ast.Assign)]
    names = {t.id: v.value for t, v in assigned if isinstance(t, ast.Name) and isinstance(v, ast.Constant)}
    try:
        return f"{names['MAJOR']}.{names['MINOR']}"
    except KeyError as error:
        raise PatchError(f"{path} does not say which release this is: no {error}") from error


def patched(text: bytes, insertion: Insertion) -> bytes:
    """``text``, which is not patched, with the lines of ``insertion``."""
    place = _last_return(text, insertion)
    rows = text.splitlines(keepends=True)
    row = rows[place.lineno - 1]
    ending = row[len(row.rstrip(b"\r\n")) :] or b"\n"
    rows[place.lineno - 1 : place.lineno - 1] = _block(insertion, row[: place.col_offset], ending)
    result = b"".join(rows)
    ast.parse(result)
    assert unpatched(result, insertion) == text
    return result


def unpatched(text: bytes, insertion: Insertion) -> bytes:
    """``text`` without the lines of ``insertion``, which must be there as they were put in."""
    rows = text.splitlines(keepends=True)
    marked = [number for number, row in enumerate(rows) if _is_marked(row)]
    first, count = marked[0], len(insertion.lines)
    row = rows[first]
    indent = row[: len(row) - len(row.lstrip())]
    block = _block(insertion, indent, row[len(row.rstrip(b"\r\n")) :])
    if marked != list(range(first, first + count)) or rows[first : first + count] != block:
        raise PatchError(
            f"{insertion.file}: the lines marked '{MARK.strip()}' are not those of this patch; "
            "take them out by hand, or restore the file"
        )
    return b"".join(rows[:first] + rows[first + count :])


def is_patched(text: bytes) -> bool:
    """Whether any line carries the mark of a patch."""
    return any(_is_marked(row) for row in text.splitlines())


def _is_marked(row: bytes) -> bool:
    return row.rstrip(b"\r\n").endswith(MARK.encode())


def _block(insertion: Insertion, indent: bytes, ending: bytes) -> list[bytes]:
    return [indent + line.encode() + MARK.encode() + ending for line in insertion.lines]


def _last_return(text: bytes, insertion: Insertion) -> ast.Return:
    """The statement that the lines go before."""

    def unknown(how: str) -> PatchError:
        return PatchError(f"{insertion.file} is not as this patch expects: {how}; it was left alone")

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise unknown(f"it does not parse ({error})") from error
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == insertion.function]
    if len(found) != 1:
        raise unknown(f"it defines {insertion.function}() {len(found)} times")
    function = found[0]
    parameters = tuple(argument.arg for argument in function.args.args)
    if parameters != insertion.parameters:
        expected = ", ".join(insertion.parameters)
        raise unknown(f"{insertion.function}({', '.join(parameters)}) should take ({expected})")
    last = function.body[-1]
    if not (isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and last.value.id == parameters[0]):
        raise unknown(f"{insertion.function}() does not end with 'return {parameters[0]}'")
    if text.splitlines()[last.lineno - 1][: last.col_offset].strip():
        raise unknown(f"the last return of {insertion.function}() shares its line with something else")
    return last


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole, keeping its mode; after a failure it is as it was."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def run(action: str, root: Path, folder: Path = HERE) -> tuple[bool, str]:
    """Do what the command line asks for.

    Returns
    -------
    tuple of (bool, str)
        Whether Megatron is patched now, and a sentence.

    Raises
    ------
    PatchError
        Where nothing was changed because something is not as expected.
    """
    patches, release = read_patches(folder), release_of(root)
    if release not in patches:
        known = ", ".join(sorted(patches))
        raise PatchError(f"{root} has megatron-core {release}, and there are patches for {known}; it was left alone")
    insertion = patches[release]
    path = (root / insertion.file).resolve()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error}") from error
    there = is_patched(text)
    clean = unpatched(text, insertion) if there else text  # also refuses lines that were edited since
    wanted = {"apply": True, "remove": False, "check": there}[action]
    if wanted == there:
        return there, f"{path} is {'' if there else 'not '}patched (megatron-core {release})"
    try:
        replace_file(path, patched(text, insertion) if wanted else clean)
    except OSError as error:
        raise PatchError(f"{path} cannot be replaced: {error}; it was left alone") from error
    return wanted, f"{path}: {'added' if wanted else 'removed'} {len(insertion.lines)} lines (megatron-core {release})"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="patches/apply.py", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("apply", "check", "remove"))
    parser.add_argument("path", type=Path, metavar="PATH", help="the folder that holds megatron/")
    options = parser.parse_args(argv)
    try:
        there, message = run(options.action, options.path)
    except PatchError as error:
        print(error, file=sys.stderr)
        return 2
    print(message)
    return int(options.action == "check" and not there)


if __name__ == "__main__":
    sys.exit(main())
