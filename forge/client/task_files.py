"""Tasks in a JSON Lines file, for `forge queue submit` and the trainer's evaluation.

Owns the format: a line is a JSON object with `payload` (an object) and, to override the reader's
defaults, `domain`, `scaffold`, `group_size`, `difficulty`, `priority`, `agent_rewards`, `user`,
`chat_template_kwargs`, `metadata`, `models`, `sampling`. The reader sets ids, tags and purpose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forge.core.errors import InvalidArgument
from forge.core.tasks.template_kwargs import kwargs_json, merged
from forge.core.tasks.validation import check_task_fields
from forge.runtime.files.json_lines import read_json_lines
from forge.v1 import common_pb2

_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "agent_rewards": ((bool,), "true or false"),
    "chat_template_kwargs": ((dict,), "an object"),
    "difficulty": ((int, float), "a number"),
    "domain": ((str,), "a text"),
    "group_size": ((int,), "a whole number"),
    "metadata": ((dict,), "an object of texts"),
    "models": ((list,), "an array of texts"),
    "payload": ((dict,), "an object"),
    "priority": ((int,), "a whole number"),
    "sampling": ((str,), "a text"),
    "scaffold": ((str,), "a text"),
    "user": ((str,), "a text"),
}
"""Fields of a line, each with its JSON types and their name."""
_RANGES = {"difficulty": "0 to 1", "group_size": "1 to 4294967295", "priority": "0 to 4294967295"}
"""Values of the fields that are numbers."""
SAMPLING_POLICIES = {
    "agent": common_pb2.SAMPLING_POLICY_AGENT,
    "bound": common_pb2.SAMPLING_POLICY_BOUND,
    "override": common_pb2.SAMPLING_POLICY_OVERRIDE,
}
"""Values of `sampling`: whose sampling parameters the rollouts use."""


def read_tasks(
    file: Path,
    defaults: common_pb2.Task,
    *,
    check: Callable[[common_pb2.Task], None] = lambda _: None,
) -> list[common_pb2.Task]:
    """Read the tasks of a file, without ids. Raises InvalidArgument with file, line and field, also
    for a task that `check` refuses with InvalidArgument."""
    try:
        lines = read_json_lines(file)
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}") from None
    tasks = []
    for number, line in lines:
        try:
            tasks.append(_task(line, defaults))
            check(tasks[-1])
        except (ValueError, InvalidArgument) as error:
            raise InvalidArgument(f"{file}, line {number}: {error}") from None
    if not tasks:
        raise InvalidArgument(f"{file} holds no task")
    return tasks


def write_tasks(file: Path, tasks: Iterable[common_pb2.Task]) -> None:
    """Writes tasks for `read_tasks`, without ids, tags and purposes."""
    names = {policy: name for name, policy in SAMPLING_POLICIES.items()}
    lines = (
        json.dumps(
            {
                "payload": json.loads(task.payload_json),
                "domain": task.domain,
                "scaffold": task.scaffold,
                "group_size": task.group_size,
                "difficulty": task.difficulty,
                "priority": task.priority,
                "agent_rewards": task.agent_rewards,
                "user": task.user,
                "chat_template_kwargs": merged(task.chat_template_kwargs_json),
            }
            | ({"sampling": names[task.sampling]} if task.sampling else {})
            | ({"models": list(task.models)} if task.models else {})
            | ({"metadata": dict(task.metadata)} if task.metadata else {})
        )
        for task in tasks
    )
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _task(line: Any, defaults: common_pb2.Task) -> common_pb2.Task:
    if not isinstance(line, dict) or not isinstance(line.get("payload"), dict):
        raise InvalidArgument("must be a JSON object with an object `payload`")
    unknown = sorted(line.keys() - _FIELDS.keys())
    if unknown:
        raise InvalidArgument(
            f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}"
        )
    task = common_pb2.Task()
    task.CopyFrom(defaults)
    for field, value in line.items():
        kinds, called = _FIELDS[field]
        # A bool is an int to Python, and not to JSON.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InvalidArgument(f"{field} must be {called}, not {json.dumps(value):.80}")
        if field == "chat_template_kwargs" and isinstance(value, dict):
            task.chat_template_kwargs_json = kwargs_json(value)
        elif field == "models" and isinstance(value, list):
            _set_models(task, value)
        elif field == "metadata" and isinstance(value, dict):
            _set_metadata(task, value)
        elif field != "payload":
            _set(task, field, value)
    task.payload_json = json.dumps(line["payload"])
    if not task.domain:
        raise InvalidArgument("has no `domain`: add it, or name one for all lines with --domain")
    check_task_fields(task)
    return task


def _set_models(task: common_pb2.Task, names: list[Any]) -> None:
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"models must be an array of texts, not {json.dumps(names):.80}")
    task.ClearField("models")
    task.models.extend(names)


def _set_metadata(task: common_pb2.Task, facts: dict[str, Any]) -> None:
    if not all(isinstance(value, str) for value in facts.values()):
        raise InvalidArgument(f"metadata must be an object of texts, not {json.dumps(facts):.80}")
    task.metadata.clear()
    task.metadata.update(facts)


def _set(task: common_pb2.Task, field: str, value: Any) -> None:
    if field == "sampling":
        if value not in SAMPLING_POLICIES:
            raise InvalidArgument(f"sampling {value!r} must be agent, bound or override")
        value = SAMPLING_POLICIES[value]
    try:
        setattr(task, field, value)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"{field} {value} must be from {_RANGES[field]}") from None
