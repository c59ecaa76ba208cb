"""The wire format, from the protos and their comments.

buf compiles the protos to descriptors with source positions; a comment belongs to the element whose
path in the descriptor it names (`google.protobuf.SourceCodeInfo.Location`).
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from docs.hooks.page import ROOT, Page, table

Comments = Mapping[tuple[int, ...], str]
"""By path in the file's descriptor."""

_PACKAGE, _MESSAGE, _ENUM, _SERVICE = 2, 4, 5, 6
"""Numbers of the fields of FileDescriptorProto that paths begin with."""
_OF_PARENT = {"field": 2, "nested": 3, "enum": 4, "method": 2, "value": 2}
_SCALARS = {number: name[5:].lower() for name, number in FieldDescriptorProto.Type.items()}


def pages() -> Iterator[Page]:
    """One page for each proto file: its services first, then its messages and enums."""
    for file in _compiled().file:
        if file.name.startswith("forge/"):
            yield Page(path=_path(file.name), text=_text(file))


def places() -> Iterator[tuple[str, str]]:
    """Each proto file and its page in the site."""
    for file in _compiled().file:
        yield f"protos/{file.name}", _path(file.name)


def _path(proto: str) -> str:
    return f"reference/protos/{Path(proto).stem}.md"


@functools.cache
def _compiled() -> FileDescriptorSet:
    buf = Path(sys.executable).parent / "buf"
    command = [str(buf), "build", "--as-file-descriptor-set", "-o", "-"]
    image = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    return FileDescriptorSet.FromString(image)


def _text(file: FileDescriptorProto) -> str:
    comments = {
        tuple(place.path): _prose(place.leading_comments or place.trailing_comments)
        for place in file.source_code_info.location
    }
    about = [
        _prose(block)
        for place in file.source_code_info.location
        if tuple(place.path) == (_PACKAGE,)
        for block in (*place.leading_detached_comments, place.leading_comments)
    ]
    lines = [f"# {Path(file.name).name}", "", *about, "", f"Package `{file.package}`.", ""]
    for at, service in enumerate(file.service):
        lines += [f"## {service.name}", "", comments.get((_SERVICE, at), ""), ""]
        for index, method in enumerate(service.method):
            path = (_SERVICE, at, _OF_PARENT["method"], index)
            lines += _method(method, comments.get(path, ""))
    if file.message_type:
        lines += ["## Messages", ""]
    for at, message in enumerate(file.message_type):
        lines += _message(message, (_MESSAGE, at), comments, prefix="")
    if file.enum_type:
        lines += ["## Enums", ""]
    for at, enum in enumerate(file.enum_type):
        lines += _enum(enum, (_ENUM, at), comments, prefix="")
    return "\n".join(lines)


def _method(method: MethodDescriptorProto, comment: str) -> list[str]:
    request = ("stream " if method.client_streaming else "") + _short(method.input_type)
    response = ("stream " if method.server_streaming else "") + _short(method.output_type)
    call = f"rpc {method.name}({request}) returns ({response})"
    return [f"### {method.name}", "", "```proto", call, "```", "", comment, ""]


def _message(
    message: DescriptorProto, path: tuple[int, ...], comments: Comments, *, prefix: str
) -> list[str]:
    name = prefix + message.name
    lines = [f"### {name}", "", comments.get(path, ""), ""]
    if message.field:
        rows = (
            (
                f"`{field.name}`",
                str(field.number),
                f"`{_field_type(field, message)}`",
                _one_of(field, message) + comments.get((*path, _OF_PARENT["field"], at), ""),
            )
            for at, field in enumerate(message.field)
        )
        lines += table(["field", "number", "type", "meaning"], rows)
    for at, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            below = (*path, _OF_PARENT["nested"], at)
            lines += _message(nested, below, comments, prefix=f"{name}.")
    for at, enum in enumerate(message.enum_type):
        lines += _enum(enum, (*path, _OF_PARENT["enum"], at), comments, prefix=f"{name}.")
    return lines


def _enum(
    enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments, *, prefix: str
) -> list[str]:
    rows = (
        (
            f"`{value.name}`",
            str(value.number),
            comments.get((*path, _OF_PARENT["value"], at), ""),
        )
        for at, value in enumerate(enum.value)
    )
    lines = [f"### {prefix}{enum.name}", "", comments.get(path, ""), ""]
    return [*lines, *table(["value", "number", "meaning"], rows)]


def _field_type(field: FieldDescriptorProto, parent: DescriptorProto) -> str:
    name = _short(field.type_name) if field.type_name else _SCALARS[field.type]
    for nested in parent.nested_type:
        if nested.options.map_entry and nested.name == name.rpartition(".")[2]:
            key, value = nested.field
            return f"map<{_field_type(key, nested)}, {_field_type(value, nested)}>"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _one_of(field: FieldDescriptorProto, parent: DescriptorProto) -> str:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return f"One of `{parent.oneof_decl[field.oneof_index].name}`. "


def _prose(comment: str) -> str:
    """The comment as Markdown: lines that are indented in it keep their layout."""
    lines = []
    for indented, block in groupby(comment.splitlines(), key=lambda line: line.startswith("   ")):
        part = [line.removeprefix(" ") for line in block]
        lines += ["", "```text", *part, "```", ""] if indented else part
    return "\n".join(lines).strip("\n")


def _short(type_name: str) -> str:
    return type_name.removeprefix(".forge.v1.").removeprefix(".")
