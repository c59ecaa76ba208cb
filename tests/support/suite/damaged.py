"""Inputs of fuzz targets: damaged bytes, damaged JSON, and messages of any protobuf type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

PIECES = (
    *(
        b"\xff",
        b"\xed\xa0\x80",
        b"\x00",
        b'"',
        b"\\",
        b"\\ud800",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
    ),
    *(b"null", b"NaN", b"-1", b"1e400", b"9" * 30, b"9" * 5000, b"\n", b"\x7f", b"=", b"."),
    *(b"[" * 5000, b'{"a":' * 5000, b"\x91" * 5000),
)
"""Bytes at which decoders of JSON, TOML and MessagePack failed before, here or elsewhere."""
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400, -(2**63) - 1),
    *("", "x", "\ud800", "\0", "é" * 300, [], {}, [None], ["x"], {"a": {}}, [[1]], [{"a": 0}]),
)
ODD_VALUES = tuple(json.dumps(value) for value in _ODD)
"""JSON values at the limits of types."""
TEXTS: dict[str, tuple[str, ...]] = {
    "trajectory_id": ("t:0:0", "t:0:4294967296"),
    "task_id": ("t",),
    "payload_json": ("{}", "[" * 5000, "9" * 5000),
    "role": ("user", "assistant", "tool"),
    "tools_json": ('[{"function": {"name": "look"}}]', "[" * 5000),
    "event_id": ("e",),
    "dtype": ("float32",),
    "table": ("groups", "turns"),
}
"""Valid and almost valid texts of fields that would otherwise be refused at once."""
_INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
}

AnyMessage = TypeVar("AnyMessage", bound=Message)


def damaged(*samples: bytes) -> st.SearchStrategy[bytes]:
    """One of the samples with bytes replaced, removed or inserted; or any bytes."""
    piece = st.binary(max_size=2) | st.sampled_from(PIECES)
    edit = st.tuples(st.integers(0, 2**16), st.integers(0, 8), piece)
    changed = st.builds(edited, st.sampled_from(samples), st.lists(edit, max_size=4))
    return st.one_of(changed, changed, changed, st.binary(max_size=64))


def edited(sample: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """The sample after each edit: at a position some bytes are removed, others inserted."""
    for position, removed, inserted in edits:
        start = position % (len(sample) + 1)
        sample = sample[:start] + inserted + sample[start + removed :]
    return sample


def damaged_json(*samples: Any) -> st.SearchStrategy[bytes]:
    """One of the JSON objects with other values at a few places; or with damaged bytes."""
    edit = st.tuples(st.integers(0, 2**16), st.sampled_from(ODD_VALUES))
    values = st.builds(
        _with_values,
        st.sampled_from([json.dumps(sample) for sample in samples]),
        st.lists(edit, min_size=1, max_size=3),
    )
    return st.one_of(values, values, damaged(*(json.dumps(sample).encode() for sample in samples)))


def _with_values(sample: str, edits: list[tuple[int, str]]) -> bytes:
    changed = json.loads(sample)
    for position, value in edits:
        places = list(_places(changed))
        if places:
            container, key = places[position % len(places)]
            container[key] = json.loads(value)
    return json.dumps(changed).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value in a JSON document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def messages(kind: type[AnyMessage]) -> st.SearchStrategy[AnyMessage]:
    """Messages of a type as they arrive: fields are absent, at limits, or unknown enum values."""
    fields = _fields(kind.DESCRIPTOR)
    return fields.map(lambda given: kind.FromString(kind(**given).SerializeToString()))


@cache
def _fields(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    optional = {
        field.name: st.lists(_value(field), max_size=3) if field.is_repeated else _value(field)
        for field in descriptor.fields
        if not (field.message_type and field.message_type.GetOptions().map_entry)
    }
    return st.fixed_dictionaries({}, optional=optional)


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        return st.sampled_from((0, 1, low, high)) | st.integers(low, high)
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return st.sampled_from(TEXTS.get(field.name, ("x",))) | st.text(max_size=6)
        case FieldDescriptor.TYPE_BYTES:
            return st.sampled_from((b"\1\0\0\0", b"")) | st.binary(max_size=12)
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_ENUM:
            return st.integers(0, 5) | st.sampled_from((-1, 99))
        case FieldDescriptor.TYPE_MESSAGE:
            return st.deferred(lambda: _fields(field.message_type))
    raise AssertionError(f"no inputs for the type of {field.full_name}")
