"""`forge pool` and `forge trajectories` against a running pool, as an operator types them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from pyarrow import parquet

from forge.cli.rundir import RunDirectory
from forge.core.token_columns import float32_array, int32_array
from forge.runtime.coordination import Coordinator
from forge.v1 import common_pb2, pool_pb2
from services.pool.storage.environment.file_locks import lock_directory
from services.pool.store import PoolStore
from tests.support.pool.damage import flip_served
from tests.support.pool.process import CALL_S, PoolClient, PoolProcess
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import fetch
from tests.support.runtime.command import run_command
from tests.support.runtime.etcd import EtcdServer

pytestmark = pytest.mark.commands

CLUSTER = "pool-cli"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    code: int
    stdout: str
    stderr: str


@pytest_asyncio.fixture(scope="module")
async def pool(
    tmp_path_factory: pytest.TempPathFactory, shared_etcd: EtcdServer
) -> AsyncIterator[PoolProcess]:
    """A pool in a directory like that of a run."""
    folder = tmp_path_factory.mktemp("runs") / CLUSTER
    process = PoolProcess(folder, etcd=shared_etcd, cluster=CLUSTER)
    process.start()
    (folder / "etcd.endpoints").write_text(shared_etcd.endpoint + "\n")
    with RunDirectory(folder).locked():
        yield process
    process.kill()


@pytest_asyncio.fixture(scope="module", autouse=True)
async def client(pool: PoolProcess, shared_etcd: EtcdServer) -> AsyncIterator[PoolClient]:
    """Fills the pool: three sealed trajectories and an open one."""
    coordinator = await Coordinator.connect(shared_etcd.endpoint, cluster=CLUSTER)
    client = await PoolClient.connect(pool, coordinator)
    await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=[make_group("a")], fence=1))
    turns = [make_turn(f"a:{n}:0", index, prefix=5 * index) for n in range(3) for index in range(2)]
    await client.append([*turns, make_turn("a:3:0")])
    for number, value in enumerate((0.0, 0.5, 1.0)):
        await client.seal(f"a:{number}:0", 2, [make_reward(value=value)])
    yield client
    await client.close()
    await coordinator.close()


async def forge(pool: PoolProcess, *words: str, of: str = "pool") -> Done:
    """Runs `forge <of> <words>` against the run."""
    ended = await run_command(of, *words, "--run-dir", str(pool.data_dir.parent))
    return Done(code=ended.returncode, stdout=ended.stdout, stderr=ended.stderr)


async def start(pool: PoolProcess, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forge.cli.main", "pool", *words),
        *("--run-dir", str(pool.data_dir.parent)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_query_lists_matching_trajectories(pool):
    """A table for people, an object per line for programs; an invalid condition is one line."""
    table, lines, wrong = await asyncio.gather(
        forge(pool, "ls", "--min-reward", "0.5", "--since", "1h", of="trajectories"),
        # Its name before.
        forge(pool, "query", "--json", "--limit", "2"),
        forge(pool, "ls", "--since", "yesterday", of="trajectories"),
    )
    assert table.code == 0, table.stderr
    assert "a:1:0" in table.stdout and "a:2:0" in table.stdout and "a:0:0" not in table.stdout
    rows = [json.loads(line) for line in lines.stdout.splitlines()]
    assert [row["trajectory_id"] for row in rows] == ["a:0:0", "a:1:0"]
    assert rows[1]["rewards"][0]["value"] == 0.5
    assert wrong.code == 2
    assert wrong.stderr.startswith("forge: --since 'yesterday' must be a time ago")
    assert wrong.stderr.count("\n") == 1


async def test_show_draws_the_branches_of_a_trajectory(pool):
    """A tree for people, the row of an export for programs; an unknown id is one line."""
    tree, row, unknown, wrong = await asyncio.gather(
        forge(pool, "show", "a:1:0", of="trajectories"),
        forge(pool, "show", "a:1:0", "--json", of="trajectories"),
        forge(pool, "show", "b:0:0", of="trajectories"),
        forge(pool, "show", "a", of="trajectories"),
    )
    assert tree.code == 0, tree.stderr
    assert "a:1:0" in tree.stdout and "1 branch" in tree.stdout and "turn 1" in tree.stdout
    assert [turn["turn_index"] for turn in json.loads(row.stdout)["turns"]] == [0, 1]
    assert (unknown.code, unknown.stderr.count("\n")) == (2, 1)
    assert "no pool shard has the turns of b:0:0" in unknown.stderr
    assert "must be task_id:rollout_index:attempt" in wrong.stderr


async def test_export_has_every_sampled_number(pool, client, tmp_path):
    """Parquet and JSON Lines have the same rows: each sealed trajectory with its turns, ids,
    log-probs, versions and rewards; an existing file is not overwritten."""
    for name in ("all.parquet", "all.jsonl"):
        done = await forge(pool, "export", str(tmp_path / name))
        assert done.code == 0, done.stderr
        assert "3 trajectories" in done.stdout
    again, unknown = await asyncio.gather(
        forge(pool, "export", str(tmp_path / "all.jsonl"), of="trajectories"),
        forge(pool, "export", str(tmp_path / "all.csv")),
    )
    assert (again.code, unknown.code) == (2, 2)
    assert "exists already" in again.stderr and "must end with one of" in unknown.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "all.parquet"]
    rows = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert rows == [json.loads(line) for line in (tmp_path / "all.jsonl").open()]
    for row, trajectory in zip(rows, await client.fetch("a:0:0", "a:1:0", "a:2:0"), strict=True):
        assert (row["trajectory_id"], row["state"]) == (trajectory.trajectory_id, "sealed")
        assert [reward["value"] for reward in row["rewards"]] == [
            reward.value for reward in trajectory.rewards
        ]
        for turn, sent in zip(row["turns"], trajectory.turns, strict=True):
            assert (turn["parent_turn"], turn["prefix_tokens"]) == (
                sent.parent_turn,
                sent.prefix_tokens,
            )
            assert turn["prompt_ids"] == int32_array(sent.prompt_ids).tolist()
            assert turn["sampled_ids"] == int32_array(sent.sampled.ids).tolist()
            assert turn["logprobs"] == float32_array(sent.sampled.logprobs).tolist()
            assert turn["weight_versions"] == int32_array(sent.sampled.weight_versions).tolist()


async def test_tail_prints_trajectories_and_its_cursor(pool):
    """From the start it prints every trajectory; stopped, it prints the cursor to resume with."""
    process = await start(pool, "tail", "--from-start", "--json")
    assert process.stdout is not None
    lines = [json.loads(await process.stdout.readline()) for _ in range(3)]
    process.terminate()
    _, stderr = await process.communicate()
    assert [line["summary"]["trajectory_id"] for line in lines] == ["a:0:0", "a:1:0", "a:2:0"]
    assert process.returncode == 130
    assert stderr.decode() == "Continue with: forge trajectories tail --cursor s0/3\n"


async def test_stats_and_files_of_a_running_pool(pool, tmp_path):
    """Counts by domain and state; the files of the running shard are checked and copied."""
    shown = await forge(pool, "stats")
    assert shown.code == 0, shown.stderr
    assert "oldest pending group: a at index 0" in shown.stdout
    shard = str(pool.data_dir)
    ended = await asyncio.gather(
        run_command("pool", "check", shard),
        run_command("pool", "backup", shard, str(tmp_path / "copy")),
    )
    assert [one.returncode for one in ended] == [0, 0], ended
    words = ("backup", shard, str(tmp_path / "more"), "--incremental", str(tmp_path / "copy"))
    more = await run_command("pool", *words)
    assert (more.returncode, more.stderr) == (0, ""), more
    assert more.stdout.startswith(f"{tmp_path / 'more'}: 0 changed and 0 deleted records since ")


async def test_running_pool_is_compacted_by_its_directory(pool, client, tmp_path):
    """The command for a stopped pool, which needs no run; if the running pool has another
    directory, the line says so."""
    before = await client.fetch("a:0:0")
    inode = (pool.data_dir / "data.mdb").stat().st_ino
    live = await forge(pool, "compact", str(pool.data_dir))
    assert (live.code, live.stderr) == (0, ""), live
    assert re.search(r"data: [\d.]+ \w+ before, [\d.]+ \w+ after", live.stdout)
    assert (pool.data_dir / "data.mdb").stat().st_ino != inode
    assert await client.fetch("a:0:0") == before
    backup = str(tmp_path / "copy")
    for words in (("backup", str(pool.data_dir), backup), ("compact", backup)):
        done = await run_command("pool", *words, directory=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    # As a follower's would be: in use, under the same name, and not by the one that is registered.
    lock = lock_directory(Path(backup))
    elsewhere = await forge(pool, "compact", backup)
    os.close(lock)
    assert elsewhere.code == 2
    assert elsewhere.stderr.startswith("forge: the instance that serves the shard has it in ")
    assert elsewhere.stderr.count("\n") == 1


@pytest.mark.faults
async def test_export_continues_past_damage(pool, client, tmp_path):
    """Every other trajectory is in the file; the damaged one is named, and the exit code is 1."""
    said = "only this turn says so"
    names = [f"hurt:{number}:0" for number in range(3)]
    for name in names:
        await client.append([make_turn(name, messages_json=said if name == names[1] else "")])
        await client.seal(name, 1, [make_reward()], domain="hurt")
    flip_served(pool.data_dir, said.encode())
    file = tmp_path / "hurt.jsonl"
    done = await forge(pool, "export", str(file), "--domain", "hurt")
    assert done.code == 1
    assert done.stderr == "forge: hurt:1:0 of pool shard s0 is damaged and skipped\n"
    assert done.stdout.startswith(f"{file}: 2 trajectories, ") and "freed" not in done.stdout
    rows = [json.loads(line) for line in file.open()]
    assert [row["trajectory_id"] for row in rows] == [names[0], names[2]]


async def test_export_formats_of_one_group(pool, client, tmp_path):
    """Conversations, pairs and tokens of the trajectories that match; reasons for what is left
    out."""
    for number, answer in enumerate(("bad", "good")):
        name = f"chat:{number}:0"
        said = {
            "shared": 0,
            "tools": [],
            "messages": [{"role": "user", "content": "Which?"}],
            "answer": {"role": "assistant", "content": answer},
        }
        await client.append(
            [make_turn(name, messages_json=json.dumps(said)), make_turn(name, 1, prefix=5)]
        )
        await client.seal(name, 2, [make_reward(value=float(number))], domain="chat")
    formats = ("sft", "preference", "tokens")
    words = ("--domain", "chat", "--since", "1h", "--format")
    done = await asyncio.gather(
        *(forge(pool, "export", str(tmp_path / f"{name}.jsonl"), *words, name) for name in formats)
    )
    assert [one.code for one in done] == [0, 0, 0], done
    rows = [[json.loads(line) for line in (tmp_path / f"{n}.jsonl").open()] for n in formats]
    sft, (pair,), tokens = rows
    assert [row["messages"][-1]["content"] for row in sft] == ["bad", "good"]
    assert "left out: 2 turns without messages on record" in done[0].stdout
    assert (pair["chosen_id"], pair["rejected_id"], pair["margin"]) == ("chat:1:0", "chat:0:0", 1.0)
    assert pair["prompt"] == [{"role": "user", "content": "Which?"}]
    assert pair["chosen"] == [{"role": "assistant", "content": "good"}]
    assert [row["advantages"][3:5] for row in tokens] == [[-0.5, -0.5], [0.5, 0.5]]
    assert [row["loss_mask"] for row in tokens] == [[0, 0, 0, 1, 1, 0, 0, 0, 1, 1]] * 2


async def test_trajectories_are_found_by_labels_and_text(pool, client):
    """Over the command line as in the store; a wrong condition is one line."""
    group = make_group("labeled", 9)
    group.task.tag = "eval-7"
    group.task.metadata["level"] = "3"
    await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=[group], fence=1))
    said = json.dumps({"messages": [], "answer": {"role": "assistant", "content": "A Needle."}})
    await client.append([make_turn("labeled:0:0", messages_json=said), make_turn("labeled:1:0")])
    for number in range(2):
        await client.seal(f"labeled:{number}:0", 1, [make_reward()])
    words = ("ls", "--json", "--scaffold", "whitebox", "--where", "level=3", "--tag", "eval-7")
    by_label, by_text, wrong = await asyncio.gather(
        forge(pool, *words, of="trajectories"),
        forge(pool, *words, "--text", "needle", of="trajectories"),
        forge(pool, "ls", "--where", "level", of="trajectories"),
    )
    rows = [json.loads(line)["trajectory_id"] for line in by_label.stdout.splitlines()]
    assert rows == ["labeled:0:0", "labeled:1:0"]
    (match,) = [json.loads(line) for line in by_text.stdout.splitlines()]
    assert match["trajectory"]["trajectory_id"] == "labeled:0:0"
    assert match["excerpt"] == "A Needle."
    assert "1 turns without messages on record" in by_text.stderr
    assert (wrong.code, wrong.stderr) == (2, "forge: --where 'level' must be KEY=VALUE\n")


async def test_archived_group_is_freed_by_the_running_pool(pool, client, tmp_path):
    """The files are archived first, then the service frees what the archive has; a new shard has
    the group."""
    await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=[make_group("kept", 11)], fence=1))
    await client.append([make_turn("kept:0:0")])
    await client.seal("kept:0:0", 1, [make_reward()])
    settled = pool_pb2.SetGroupStatesRequest.Change(
        task_id="kept", state=common_pb2.GROUP_STATE_TOMBSTONED, reason="tried"
    )
    await client.stub.SetGroupStates(
        pool_pb2.SetGroupStatesRequest(changes=[settled], fence=1), timeout=CALL_S
    )
    before = await client.fetch("kept:0:0")
    url = f"file://{tmp_path}/archive"
    done = await forge(pool, "archive", str(pool.data_dir), "--to", url, "--free")
    assert (done.code, done.stderr) == (0, ""), done
    assert "1 groups in 1 segments" in done.stdout and "1 archived groups are freed" in done.stdout
    with pytest.raises(grpc.aio.AioRpcError, match="freed"):
        await client.fetch("kept:0:0")
    copy = await run_command("pool", "restore-archive", url, str(tmp_path / "copy"))
    assert (copy.returncode, copy.stderr) == (0, "")
    store = PoolStore(tmp_path / "copy")
    assert [fetch(store, "kept:0:0")] == before
    store.close()
