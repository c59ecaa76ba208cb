"""Compares an installed TensorRT-LLM with the surface that the adapter uses.

Parses source text, and imports nothing: the library itself cannot be imported on a host without its
GPU stack. Follows re-exports, second names of a class and base classes within the tree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from services.inference.engines.tensorrt_llm.library.surface import (
    ClassSurface,
    Member,
    Method,
    Surface,
)

PACKAGE = "tensorrt_llm"
_MOST_STEPS = 20
"""Longest chain of re-exports or base classes that is followed."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that the tree has otherwise than the surface."""

    path: str
    """`module:Class[.member[.parameter]]`."""
    text: str
    """Expected and found signature."""


class Tree:
    """The source files of one installed package."""

    def __init__(self, root: Path) -> None:
        """`root`: the folder of the package, with its __init__.py."""
        self.root = root
        self._module = cache(self._parse)

    def version(self) -> str:
        """Return `__version__` of version.py; empty if there is none."""
        module = self._module(f"{PACKAGE}.version")
        for statement in module.body if module else ():
            match statement:
                case ast.Assign(
                    targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))
                ):
                    return version
        return ""

    def has_module(self, module: str) -> bool:
        """Whether there is a source file of this module."""
        return self._module(module) is not None

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return a class and the module that defines it, behind re-exports and second names."""
        for _ in range(_MOST_STEPS):
            parsed = self._module(module)
            if parsed is None:
                return None
            for statement in _statements(parsed.body):
                if isinstance(statement, ast.ClassDef) and statement.name == name:
                    return module, statement
            source = _import_of(parsed, module, name, is_package=self._is_package(module))
            if source is None and (first := _first_name(parsed, name)):
                source = module, first
            if source is None:
                return None
            module, name = source
        return None

    def lineage(self, module: str, defined: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """Yield a class and those that it inherits from, nearest first, within the tree."""
        waiting = [(module, defined)]
        for _ in range(_MOST_STEPS):
            if not waiting:
                return
            module, current = waiting.pop(0)
            yield current
            for base in current.bases:
                found = self.find(module, base.id) if isinstance(base, ast.Name) else None
                if found is not None:
                    waiting.append(found)

    def places(self, name: str) -> list[str]:
        """Return the modules that define a class of this name."""
        found = []
        for file in sorted(self.root.rglob("*.py")):
            if f"class {name}" not in file.read_text(encoding="utf-8", errors="replace"):
                continue
            parts = file.relative_to(self.root).with_suffix("").parts
            module = ".".join((PACKAGE, *(part for part in parts if part != "__init__")))
            parsed = self._module(module)
            statements = _statements(parsed.body) if parsed else ()
            if any(isinstance(one, ast.ClassDef) and one.name == name for one in statements):
                found.append(module)
        return found

    def _parse(self, module: str) -> ast.Module | None:
        file = self._file(module)
        if file is None:
            return None
        try:
            return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
        except (SyntaxError, ValueError):
            return None

    def _file(self, module: str) -> Path | None:
        first, *parts = module.split(".")
        base = self.root.joinpath(*parts)
        candidates = (
            (base / "__init__.py", base.with_suffix(".py")) if parts else (base / "__init__.py",)
        )
        return next((one for one in candidates if first == PACKAGE and one.is_file()), None)

    def _is_package(self, module: str) -> bool:
        file = self._file(module)
        return file is not None and file.name == "__init__.py"


def compare(tree: Tree, surface: Surface) -> tuple[list[Difference], Surface]:
    """Return the differences, and the surface without the parts that the tree lacks.

    An absent part that the surface does not verify is no difference.
    """
    differences: list[Difference] = []
    absent: set[str] = set()
    for owner, expected in surface.classes.items():
        for path, text, verified in _class_differences(tree, owner, expected):
            absent.add(path)
            if verified and expected.verified:
                differences.append(Difference(path=path, text=text))
    return differences, replace(surface, absent=surface.absent | absent)


def _class_differences(
    tree: Tree, owner: str, expected: ClassSurface
) -> Iterator[tuple[str, str, bool]]:
    """Yield path, text, and whether the surface verifies it."""
    module, _, name = owner.partition(":")
    found = tree.find(module, name)
    if found is None:
        yield owner, _missing_class(tree, module, name), True
        return
    lineage = list(tree.lineage(*found))
    for member in expected.fields.values():
        problem = _field_problem(lineage, member)
        if problem:
            yield f"{owner}.{member.name}", problem, member.verified
    for key, method in expected.methods.items():
        for path, text, verified in _method_differences(lineage, key, method):
            yield f"{owner}.{path}", text, verified and method.verified


def _missing_class(tree: Tree, module: str, name: str) -> str:
    places = tree.places(name)
    lack = f"no class {name}" if tree.has_module(module) else "no such module"
    return f"{lack}; {name} is in {', '.join(places)}" if places else lack


def _field_problem(lineage: list[ast.ClassDef], member: Member) -> str:
    for defined in lineage:
        for statement in _statements(defined.body):
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), value=value) if name == member.name:
                    return _default_problem(_field_default(value), member)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == member.name:
                    return _default_problem(_field_default(value), member)
                case ast.FunctionDef(name=name) if name == member.name:
                    return ""
    return "no such field"


def _method_differences(
    lineage: list[ast.ClassDef], name: str, expected: Method
) -> Iterator[tuple[str, str, bool]]:
    found = _signature(lineage, name)
    if found is None:
        yield name, "no such method", True
        return
    if isinstance(found, ast.AsyncFunctionDef) != expected.is_async and not name.startswith("__"):
        yield name, "is not async" if expected.is_async else "is async", True
        return
    parameters = dict(_parameters(found))
    for one in expected.parameters:
        if one.name not in parameters:
            there = ", ".join(parameters) or "none"
            yield f"{name}.{one.name}", f"no such parameter; there are: {there}", one.verified
            continue
        problem = _default_problem(parameters[one.name], one)
        if problem:
            yield f"{name}.{one.name}", problem, one.verified
    known = {one.name for one in expected.parameters}
    for added, default in parameters.items():
        if added not in known and default is None:
            yield f"{name}.{added}", "is a new parameter without a default", True


def _signature(lineage: list[ast.ClassDef], name: str) -> _Function | None:
    """Return the first definition that names its parameters: a forwarding `*args, **kwargs` has
    those of the base class."""
    forwarding: _Function | None = None
    for defined in lineage:
        for statement in _statements(defined.body):
            if isinstance(statement, _Function) and statement.name == name:
                arguments = statement.args
                named = arguments.posonlyargs + arguments.args[1:] + arguments.kwonlyargs
                if named or arguments.vararg is None or arguments.kwarg is None:
                    return statement
                forwarding = forwarding or statement
    return forwarding


def _parameters(function: _Function) -> Iterator[tuple[str, str | None]]:
    """Yield each parameter but self, with the source text of its default."""
    arguments = function.args
    positional = arguments.posonlyargs + arguments.args
    missing = len(positional) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*([None] * missing), *arguments.defaults]
    pairs = [*zip(positional, defaults, strict=True)][1:]
    for argument, default in [
        *pairs,
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        yield argument.arg, None if default is None else ast.unparse(default)


def _default_problem(found: str | None, member: Member) -> str:
    if member.default is None or found == member.default:
        return ""
    return f"the default is {found or 'missing'}, expected {member.default}"


def _field_default(value: ast.expr | None) -> str | None:
    """Return the source text of a default, inside `field(...)` and `Field(...)` too."""
    match value:
        case None:
            return None
        case ast.Call(func=ast.Name(id="field" | "Field"), args=args, keywords=keywords):
            named = {one.arg: one.value for one in keywords}
            inner = named.get("default", args[0] if args else None)
            return None if inner is None else ast.unparse(inner)
        case _:
            return ast.unparse(value)


def _import_of(
    parsed: ast.Module, module: str, name: str, *, is_package: bool
) -> tuple[str, str] | None:
    """Return the module and name that a module imports as `name`."""
    for statement in _statements(parsed.body):
        if not isinstance(statement, ast.ImportFrom):
            continue
        for alias in statement.names:
            if (alias.asname or alias.name) == name:
                return _absolute(statement, module, is_package=is_package), alias.name
    return None


def _first_name(parsed: ast.Module, name: str) -> str:
    """Return the name that a module gives `name` as a second name of; empty if there is none."""
    for statement in _statements(parsed.body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=second)], value=ast.Name(id=first)) if (
                second == name
            ):
                return first
    return ""


def _absolute(statement: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - statement.level + (1 if is_package else 0)]
    return ".".join([*kept, *([statement.module] if statement.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, also those inside `if` and `try`."""
    for statement in body:
        yield statement
        match statement:
            case ast.If(body=inner, orelse=other):
                yield from _statements([*inner, *other])
            case ast.Try(body=inner, orelse=other, finalbody=last):
                yield from _statements([*inner, *other, *last])
                for handler in statement.handlers:
                    yield from _statements(handler.body)
