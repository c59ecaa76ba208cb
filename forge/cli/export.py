"""Writes trajectories to files: Parquet or JSON Lines.

Owns the columns and both formats; the caller provides the trajectories. One row is one trajectory,
with the same names in both formats:

    trajectory_id, task_id, domain, state, reason, closed_unix_s
    rewards: list of event_id, name, kind, value, turn_index
    turns:   list of turn_index, parent_turn, prefix_tokens, prompt_ids, sampled_ids, logprobs,
             weight_versions, allowed_logprobs, other_model (a name; "": the policy), and the
             other fields of a Turn

The full sequence of a turn is sequence(parent)[:prefix_tokens] + prompt_ids + sampled_ids. Memory
holds one row group, about ROW_GROUP_BYTES, or one trajectory if that is larger. A file gets its
name when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from forge.core.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from forge.core.token_columns import TOKEN_BYTES, float32_array, int32_array
from forge.v1 import common_pb2

ROW_GROUP_BYTES = 32 << 20

_INT_LISTS = ("prompt_ids", "sampled_ids", "weight_versions")
_FLOAT_LISTS = ("logprobs", "allowed_logprobs")
_INTS = ("turn_index", "parent_turn", "prefix_tokens", "cached_tokens", "top_k")
_TIMINGS = ("queue_s", "prefill_s", "decode_s", "agent_s")
_FLOATS = ("temperature", "top_p", "started_unix_s", *_TIMINGS)
_TEXTS = ("finish_reason", "messages_json", "parse_error", "context_action", "agent")
_STRINGS = (*_TEXTS, "other_model")
_REWARD_STRINGS = ("event_id", "name", "kind")


class Writer(Protocol):
    """A file of trajectories."""

    def add(self, trajectory: common_pb2.Trajectory) -> None:
        """Appends one trajectory."""

    def close(self) -> None:
        """Writes the rest of the file."""


@contextmanager
def export_file(path: Path) -> Iterator[Writer]:
    """Opens a new file; its suffix selects the format.

    Raises `InvalidArgument` for another suffix, `FailedPrecondition` when the file exists,
    `NotFound` when the format needs a package that is not installed.
    """
    make = _FORMATS.get(path.suffix)
    if make is None:
        raise InvalidArgument(f"{path} must end with one of {', '.join(_FORMATS)}")
    if path.exists():
        raise FailedPrecondition(f"{path} exists already: name another file")
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            writer = make(file)
            yield writer
            writer.close()
        unfinished.replace(path)
    except OSError as error:
        raise ResourceExhausted(f"{path} cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


class JsonLines:
    """One JSON object per line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def add(self, trajectory: common_pb2.Trajectory) -> None:
        """Writes one line."""
        row = _row(trajectory)
        row["rewards"] = [_reward(reward) for reward in trajectory.rewards]
        row["turns"] = [_json_turn(turn) for turn in trajectory.turns]
        self._file.write(self._encoder.encode(row))
        self._file.write(b"\n")

    def close(self) -> None:
        """Flushes the file."""
        self._file.flush()


class Parquet:
    """Row groups of about ROW_GROUP_BYTES, compressed with zstd."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise NotFound(
                "Parquet needs pyarrow: install it with `pip install forge-rl[export]`, or "
                "export to .jsonl"
            ) from None
        self._pa = pyarrow
        self._parquet = parquet
        self._file = file
        self._writer: Any = None
        self._rows: list[common_pb2.Trajectory] = []
        self._bytes = 0

    def add(self, trajectory: common_pb2.Trajectory) -> None:
        """Adds a row; writes a complete row group."""
        self._rows.append(trajectory)
        self._bytes += trajectory.ByteSize()
        if self._bytes >= ROW_GROUP_BYTES:
            self._write()

    def close(self) -> None:
        """Writes the last row group and the footer."""
        # Without trajectories the file has columns and no row.
        if self._rows or self._writer is None:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        table = self._table(self._rows)
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._rows, self._bytes = [], 0

    def _table(self, rows: Sequence[common_pb2.Trajectory]) -> Any:
        plain = [_row(row) for row in rows]
        columns = {
            name: self._pa.array(
                [row[name] for row in plain],
                self._pa.float64() if name == "closed_unix_s" else self._pa.string(),
            )
            for name in _ROW
        }
        rewards = [reward for row in rows for reward in row.rewards]
        turns = [turn for row in rows for turn in row.turns]
        columns["rewards"] = self._lists([len(row.rewards) for row in rows], self._rewards(rewards))
        columns["turns"] = self._lists([len(row.turns) for row in rows], self._turns(turns))
        return self._pa.table(columns)

    def _rewards(self, rewards: Sequence[common_pb2.RewardEvent]) -> Any:
        plain = [_reward(reward) for reward in rewards]
        types = dict.fromkeys(_REWARD_STRINGS, self._pa.string()) | {
            "value": self._pa.float64(),
            "turn_index": self._pa.int32(),
        }
        return self._struct(plain, types)

    def _turns(self, turns: Sequence[common_pb2.Turn]) -> Any:
        types = (
            dict.fromkeys(_INTS, self._pa.int32())
            | dict.fromkeys(_FLOATS, self._pa.float64())
            | dict.fromkeys(_STRINGS, self._pa.string())
        )
        plain = self._struct([_scalars(turn) for turn in turns], types)
        arrays = dict(zip(types, plain.flatten(), strict=True))
        columns = [_columns(turn) for turn in turns]
        for names, kind in ((_INT_LISTS, self._pa.int32()), (_FLOAT_LISTS, self._pa.float32())):
            for name in names:
                arrays[name] = self._column([turn[name] for turn in columns], kind)
        return self._pa.StructArray.from_arrays(list(arrays.values()), list(arrays))

    def _struct(self, rows: Sequence[dict[str, Any]], types: dict[str, Any]) -> Any:
        arrays = [self._pa.array([row[name] for row in rows], types[name]) for name in types]
        return self._pa.StructArray.from_arrays(arrays, list(types))

    def _column(self, pieces: Sequence[bytes], kind: Any) -> Any:
        """Returns one list of numbers per piece of bytes, without a conversion."""
        joined = b"".join(pieces)
        count = len(joined) // TOKEN_BYTES
        values = self._pa.Array.from_buffers(kind, count, [None, self._pa.py_buffer(joined)])
        return self._lists([len(piece) // TOKEN_BYTES for piece in pieces], values)

    def _lists(self, lengths: Sequence[int], values: Any) -> Any:
        offsets = self._pa.array([0, *accumulate(lengths)], self._pa.int32())
        return self._pa.ListArray.from_arrays(offsets, values)


_FORMATS: dict[str, Callable[[BinaryIO], Writer]] = {".parquet": Parquet, ".jsonl": JsonLines}
_ROW = ("trajectory_id", "task_id", "domain", "state", "reason", "closed_unix_s")


def _row(trajectory: common_pb2.Trajectory) -> dict[str, Any]:
    row = {name: getattr(trajectory, name) for name in ("trajectory_id", "task_id", "domain")}
    row["state"] = _word(common_pb2.TrajectoryState, trajectory.state, "TRAJECTORY_STATE_")
    return row | {"reason": trajectory.reason, "closed_unix_s": trajectory.sealed_unix_s}


def _reward(reward: common_pb2.RewardEvent) -> dict[str, Any]:
    row = {name: getattr(reward, name) for name in (*_REWARD_STRINGS, "value", "turn_index")}
    row["kind"] = _word(common_pb2.RewardKind, reward.kind, "REWARD_KIND_")
    return row


def _scalars(turn: common_pb2.Turn) -> dict[str, Any]:
    row = {name: getattr(turn, name) for name in (*_INTS, *_TEXTS)}
    row["other_model"] = turn.other_model.name
    row |= {name: getattr(turn.timings if name in _TIMINGS else turn, name) for name in _FLOATS}
    row["finish_reason"] = _word(common_pb2.FinishReason, turn.finish_reason, "FINISH_REASON_")
    return row | {name: None for name in ("top_p", "top_k") if not turn.HasField(name)}


def _word(enum: Any, number: int, prefix: str) -> str:
    name: str = enum.Name(number)
    return name.removeprefix(prefix).lower()


def _columns(turn: common_pb2.Turn) -> dict[str, bytes]:
    sampled = turn.sampled
    return {
        "prompt_ids": turn.prompt_ids,
        "sampled_ids": sampled.ids,
        "weight_versions": sampled.weight_versions,
        "logprobs": sampled.logprobs,
        "allowed_logprobs": sampled.allowed_logprobs,
    }


def _json_turn(turn: common_pb2.Turn) -> dict[str, Any]:
    row = _scalars(turn)
    columns = _columns(turn)
    row |= {name: int32_array(columns[name]).tolist() for name in _INT_LISTS}
    row |= {name: float32_array(columns[name]).tolist() for name in _FLOAT_LISTS}
    return row
