"""Messages as JSON for programs: every field has its key, and 64-bit numbers are numbers."""

from __future__ import annotations

import json
import sys
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_LONG = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)


def row_of(message: Message) -> dict[str, Any]:
    """Returns the fields by name; unset messages are left out."""
    row = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _restore_numbers(row, message.DESCRIPTOR)
    return row


def print_row(message: Message) -> None:
    """Prints a message as one line of JSON."""
    sys.stdout.write(json.dumps(row_of(message)) + "\n")


def _restore_numbers(row: dict[str, Any], kind: Any) -> None:
    """The JSON of protobuf has 64-bit numbers as texts."""
    for field in kind.fields:
        value = row.get(field.name)
        if field.type in _LONG and isinstance(value, str):
            row[field.name] = int(value)
        elif field.message_type is not None and value:
            for part in value if isinstance(value, list) else [value]:
                _restore_numbers(part, field.message_type)
