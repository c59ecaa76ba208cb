"""Files of tasks: accepted fields of a line, and errors for wrong lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forge.client.task_files import read_tasks, write_tasks
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2

DEFAULTS = common_pb2.Task(domain="qa", scaffold="blackbox", group_size=4)


def test_task_line_overrides_the_options(tmp_path: Path) -> None:
    """Empty lines are no tasks."""
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"payload": {"q": 1}}\n\n{"payload": {}, "domain": "code", "group_size": 2}\n')
    plain, other = read_tasks(file, DEFAULTS)
    assert (plain.domain, plain.group_size, plain.payload_json) == ("qa", 4, '{"q": 1}')
    assert (other.domain, other.group_size, other.scaffold) == ("code", 2, "blackbox")


def test_sampling_policy_is_read_and_written(tmp_path: Path) -> None:
    """A task names it as the settings do."""
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"payload": {}, "sampling": "bound", "models": ["old"]}\n{"payload": {}}\n')
    tasks = read_tasks(file, DEFAULTS)
    assert [task.sampling for task in tasks] == [common_pb2.SAMPLING_POLICY_BOUND, 0]
    assert [list(task.models) for task in tasks] == [["old"], []]
    write_tasks(file, tasks)
    assert read_tasks(file, DEFAULTS) == tasks


def test_metadata_is_read_written_and_checked(tmp_path: Path) -> None:
    """Texts by key; it replaces that of the options."""
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"payload": {}, "metadata": {"repository": "a/b"}}\n')
    tasks = read_tasks(file, common_pb2.Task(domain="qa", scaffold="x", group_size=1))
    assert dict(tasks[0].metadata) == {"repository": "a/b"}
    write_tasks(file, tasks)
    assert read_tasks(file, DEFAULTS) == tasks
    for wrong in ('{"a": 1}', '{"a b": "x"}', json.dumps({"a": "x" * 257}), "[]"):
        file.write_text(f'{{"payload": {{}}, "metadata": {wrong}}}\n')
        with pytest.raises(InvalidArgument, match="metadata"):
            read_tasks(file, DEFAULTS)


def test_lines_end_only_at_json_lines_breaks(tmp_path: Path) -> None:
    """Texts from the web hold separators of their own."""
    prompt = "one\u2028two\x85three"
    file = tmp_path / "tasks.jsonl"
    line = json.dumps({"payload": {"prompt": prompt}}, ensure_ascii=False)
    file.write_text(f"{line}\r\n{line}\n", encoding="utf-8")
    tasks = read_tasks(file, DEFAULTS)
    assert [json.loads(task.payload_json)["prompt"] for task in tasks] == [prompt, prompt]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "must be a JSON object with an object `payload`"),
        ('{"q": 1}', "must be a JSON object with an object `payload`"),
        ("{", "is not JSON: "),
        ('{"payload": {}, "dificulty": 1}', "unknown field 'dificulty'; known are agent_rewards, "),
        ('{"payload": {}, "domain": 3}', "domain must be a text, not 3"),
        ('{"payload": {}, "group_size": "4"}', 'group_size must be a whole number, not "4"'),
        ('{"payload": {}, "group_size": true}', "group_size must be a whole number, not true"),
        ('{"payload": {}, "group_size": -1}', "group_size -1 must be from 1 to 4294967295"),
        ('{"payload": {}, "priority": 5000000000}', "priority 5000000000 must be from 0 to 4294"),
        ('{"payload": {"q": NaN}}', "is not JSON: NaN is no number of JSON"),
        ('{"payload": {"q": 1e999}}', "is not JSON: 1e999 is too large for a number"),
        ('{"payload": {"q": "\\ud800"}}', "has \\ud800, half a surrogate pair: write the "),
        ('{"payload": {}, "group_size": 0}', "group_size 0 must be at least 1"),
        ('{"payload": {}, "difficulty": 2}', "difficulty 2.0 must be from 0 to 1"),
        (f'{{"payload": {{}}, "difficulty": {"9" * 400}}}', "difficulty 999"),
        ('{"payload": ' + "[" * 5000, "is nested too deeply"),
        ('{"payload": {}, "sampling": "greedy"}', "sampling 'greedy' must be agent, bound or "),
        ('{"payload": {}, "models": "old"}', 'models must be an array of texts, not "old"'),
        ('{"payload": {}, "models": [1]}', "models must be an array of texts, not [1]"),
        ('{"payload": {}, "models": [""]}', "models has '': 1 to 128 bytes a name"),
        (
            '{"payload": {}, "models": ' + json.dumps(["m"] * 17) + "}",
            "models has 17 names; at most 16 are allowed",
        ),
        ('{"payload": {}, "scaffold": "a b"}', "scaffold 'a b' must be 1 to 64 of "),
    ],
)
def test_wrong_task_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    """File, line, field and value, before any submission."""
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"payload": {}}\n' + line + "\n")
    with pytest.raises(InvalidArgument, match=f"tasks.jsonl, line 2:? {re.escape(said)}"):
        read_tasks(file, DEFAULTS)


def test_line_without_a_domain_names_the_remedy(tmp_path: Path) -> None:
    """A beginner forgets the option."""
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"payload": {}}\n')
    with pytest.raises(InvalidArgument, match=r"line 1: has no `domain`: add it, or .* --domain"):
        read_tasks(file, common_pb2.Task(scaffold="blackbox", group_size=1))


def test_file_with_a_byte_order_mark_and_surrogate_pairs_is_read(tmp_path: Path) -> None:
    """Editors on Windows write the mark; encoders of JSON write pairs."""
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"payload": {"q": "\\ud83d\\ude00"}}\r\n')
    (task,) = read_tasks(file, DEFAULTS)
    assert json.loads(task.payload_json) == {"q": "\U0001f600"}


@pytest.mark.parametrize("indent", [None, 2])
def test_list_of_tasks_in_place_of_lines_is_named(tmp_path: Path, indent: int | None) -> None:
    """A JSON document over several lines, and one task over several lines."""
    file = tmp_path / "tasks.json"
    task = {"domain": "qa", "payload": {}}
    file.write_text(json.dumps([task, task], indent=indent).replace("[{", "[\n{"))
    with pytest.raises(InvalidArgument, match=r"line 1 is not a whole JSON value: write each"):
        read_tasks(file, common_pb2.Task())
    file.write_text(json.dumps(task, indent=4))
    with pytest.raises(InvalidArgument, match=r"line 1 is not a whole JSON value: write each"):
        read_tasks(file, common_pb2.Task())


def test_file_without_a_task_is_named(tmp_path: Path) -> None:
    """Blank lines are no tasks."""
    file = tmp_path / "empty.jsonl"
    file.write_text("\n\n")
    with pytest.raises(InvalidArgument, match=r"empty\.jsonl holds no task"):
        read_tasks(file, common_pb2.Task())


def test_missing_task_file_is_named(tmp_path: Path) -> None:
    """In one line, with the system's error."""
    with pytest.raises(InvalidArgument, match=r"none\.jsonl: No such file or directory"):
        read_tasks(tmp_path / "none.jsonl", DEFAULTS)


def test_written_task_file_is_read_back(tmp_path: Path) -> None:
    """Except id, tag and purpose, which the reader sets."""
    task = common_pb2.Task(
        domain="code", scaffold="whitebox", group_size=2, difficulty=0.5, priority=3,
        payload_json='{"q": "é\u2028"}',
    )  # fmt: skip
    named = common_pb2.Task(task_id="a", tag="b", purpose=common_pb2.PURPOSE_EVAL)
    named.MergeFrom(task)
    write_tasks(tmp_path / "tasks.jsonl", [named])
    (found,) = read_tasks(tmp_path / "tasks.jsonl", DEFAULTS)
    assert json.loads(found.payload_json) == json.loads(task.payload_json)
    found.payload_json = task.payload_json
    assert found == task
