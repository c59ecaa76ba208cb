"""Anthropic's tools that the agent executes: bash, text editor, memory, computer.

Owns their input schemas. A request names such a tool by its `type` alone; the model gets it as a
function with the documented input. Tools that run at Anthropic are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.core.errors import InvalidArgument

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """The screen of a `computer` tool."""

    width_px: int | None = None
    height_px: int | None = None
    number: int | None = None
    zoom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """A function that stands for one of Anthropic's types."""

    name: str
    """The name that the API requires."""
    description: str
    parameters: Schema


def client_tool(kind: str, display: Display) -> ClientTool | None:
    """Returns the function of a tool type; None for a type that is not in the list.

    Raises `InvalidArgument` for a computer without the size of its display.
    """
    make = _TYPES.get(kind)
    return make(display) if make is not None else None


def known_types() -> Sequence[str]:
    """Returns all types in the list."""
    return sorted(_TYPES)


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _integers(description: str, count: int) -> Schema:
    items = {"type": "integer"}
    return {
        "type": "array",
        "items": items,
        "minItems": count,
        "maxItems": count,
        "description": description,
    }


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _bash(_: Display) -> ClientTool:
    return ClientTool(
        name="bash",
        description="Runs commands in a bash session that keeps its state.",
        parameters=_object(
            {
                "command": _text("The command to run; required unless restart is true."),
                "restart": {"type": "boolean", "description": "True restarts the session."},
            }
        ),
    )


_VIEW_RANGE = _integers("Of view: first and last line, from 1; -1 is the end of the file.", 2)
_INSERT_LINE = {
    "type": "integer",
    "description": "Of insert: the line to insert after; 0 is the beginning.",
}


def _editor(name: str, *, undo: bool, inserted: str) -> Callable[[Display], ClientTool]:
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if undo else [])]
    texts = {
        "file_text": _text("Of create: the content of the file."),
        "old_str": _text("Of str_replace: the text to replace; it must be unique in the file."),
        "new_str": _text("Of str_replace: the new text."),
    }
    if inserted in texts:
        texts[inserted] = _text("Of str_replace: the new text. Of insert: the text to insert.")
    else:
        texts[inserted] = _text("Of insert: the text to insert.")
    parameters = _object(
        {
            "command": {"type": "string", "enum": commands},
            "path": _text("A file or directory."),
            **texts,
            "insert_line": _INSERT_LINE,
            "view_range": _VIEW_RANGE,
        },
        "command",
        "path",
    )
    description = "Views, creates and edits text files."
    return lambda _: ClientTool(name=name, description=description, parameters=parameters)


def _memory(_: Display) -> ClientTool:
    return ClientTool(
        name="memory",
        description="Reads and writes files in /memories, which stay between conversations.",
        parameters=_object(
            {
                "command": {
                    "type": "string",
                    "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
                },
                "path": _text("A path below /memories; of all commands but rename."),
                "view_range": _VIEW_RANGE,
                "file_text": _text("Of create: the content of the file."),
                "old_str": _text("Of str_replace: the text to replace."),
                "new_str": _text("Of str_replace: the new text."),
                "insert_line": _INSERT_LINE,
                "insert_text": _text("Of insert: the text to insert."),
                "old_path": _text("Of rename: the present path."),
                "new_path": _text("Of rename: the new path."),
            },
            "command",
        ),
    )


_MOUSE_AND_KEYS = (
    *("screenshot", "cursor_position", "mouse_move", "left_click", "left_click_drag"),
    *("right_click", "middle_click", "double_click", "type", "key"),
)
_LATER_ACTIONS = (
    *("triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"),
)


def _computer(*later: str, zooms: bool = False) -> Callable[[Display], ClientTool]:
    def make(display: Display) -> ClientTool:
        if display.width_px is None or display.height_px is None:
            raise InvalidArgument("a computer tool needs display_width_px and display_height_px")
        zoom = zooms and display.zoom
        properties = {
            "action": {
                "type": "string",
                "enum": [*_MOUSE_AND_KEYS, *later, *(["zoom"] if zoom else [])],
            },
            "coordinate": _integers("x and y in pixels, of mouse actions.", 2),
            "text": _text("Of type: the text. Of key: the keys. Of clicks: keys held down."),
        }
        if later:
            properties |= {
                "start_coordinate": _integers("Of left_click_drag: its beginning.", 2),
                "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
                "scroll_amount": {"type": "integer", "description": "Of scroll: wheel clicks."},
                "duration": {"type": "number", "description": "Of hold_key and wait: seconds."},
            }
        if zoom:
            properties["region"] = _integers("Of zoom: x0, y0, x1, y1 in pixels.", 4)
        number = "" if display.number is None else f", display {display.number}"
        return ClientTool(
            name="computer",
            description=(
                "Uses mouse, keyboard and screenshots of a screen of "
                f"{display.width_px}x{display.height_px} pixels{number}."
            ),
            parameters=_object(properties, "action"),
        )

    return make


_OLD_EDITOR = _editor("str_replace_editor", undo=True, inserted="new_str")
_EDITOR = _editor("str_replace_based_edit_tool", undo=False, inserted="insert_text")
_TYPES: Mapping[str, Callable[[Display], ClientTool]] = {
    "bash_20241022": _bash,
    "bash_20250124": _bash,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _memory,
    "computer_20241022": _computer(),
    "computer_20250124": _computer(*_LATER_ACTIONS),
    "computer_20251124": _computer(*_LATER_ACTIONS, zooms=True),
}
