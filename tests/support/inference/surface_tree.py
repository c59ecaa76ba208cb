"""A source tree that has a surface of TensorRT-LLM, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from services.inference.engines.tensorrt_llm.library.surface import (
    ClassSurface,
    Member,
    Method,
    Surface,
)

PACKAGE = "tensorrt_llm"


def write_tree(folder: Path, surface: Surface) -> Path:
    """Write the package with all that the surface has; return its folder."""
    root = folder / PACKAGE
    modules: dict[str, list[str]] = defaultdict(list)
    for owner, shape in surface.classes.items():
        if owner in surface.paths():
            module, _, name = owner.partition(":")
            modules[module] += _class_lines(surface, owner, name, shape)
    for module, lines in modules.items():
        write_module(root, module, "\n".join(lines) + "\n")
    write_module(root, f"{PACKAGE}.version", f'__version__ = "{surface.version}"\n')
    return root


def write_module(root: Path, module: str, text: str) -> Path:
    """Write one module of the package, and its packages."""
    file = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in (file.parent, *file.parent.parents):
        if folder == root.parent:
            break
        (folder / "__init__.py").touch()
    file.write_text(text)
    return file


def edit(root: Path, module: str, old: str, new: str) -> None:
    """Replace one text of one module."""
    file = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
    file.write_text(text.replace(old, new))


def _class_lines(surface: Surface, owner: str, name: str, shape: ClassSurface) -> Iterator[str]:
    there = surface.paths()
    yield f"class {name}:"
    yield f'    """{name}."""'
    for member in shape.fields.values():
        if f"{owner}.{member.name}" in there:
            default = "" if member.default is None else f" = {member.default}"
            yield f"    {member.name}: object{default}"
    for key, method in shape.methods.items():
        if f"{owner}.{key}" in there:
            yield from _method_lines(there, f"{owner}.{key}", key, method)
    yield ""


def _method_lines(there: frozenset[str], path: str, name: str, method: Method) -> Iterator[str]:
    kept = [one for one in method.parameters if f"{path}.{one.name}" in there]
    # A parameter without a known default stands first, as Python demands.
    ordered = sorted(kept, key=lambda one: one.default is not None)
    parameters = ", ".join(["self", *(_parameter(one) for one in ordered)])
    yield f"    {'async ' if method.is_async else ''}def {name}({parameters}): ..."


def _parameter(member: Member) -> str:
    return member.name if member.default is None else f"{member.name}={member.default}"
