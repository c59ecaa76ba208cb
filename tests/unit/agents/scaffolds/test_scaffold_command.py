"""The command scaffold: real programs, their environment, limits and end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from forge.agents.launchers.bare import BareLauncher
from forge.agents.launchers.base import ANSWER, OUTPUT_BYTES, Launcher, ProgramLimits, read_answer
from forge.agents.launchers.wrapped import SandboxLauncher
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.scaffolds.command import LOGGED_CHARS, Command, command_words
from forge.core.errors import ConfigError, InvalidArgument, ResourceExhausted
from forge.runtime.tracing import as_current
from tests.support.agents.scripted_gateway import ScriptedGateway, replay, text
from tests.support.agents.tasks import SumEpisode, rollout
from tests.support.runtime.waiting import until

NO_LIMITS = ProgramLimits(memory_bytes=0, processes=0)
AGENT = """
import os, sys
from openai import OpenAI
client = OpenAI()
model = client.models.list().data[0].id
reply = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": sys.argv[1]}], max_tokens=8
)
print("thinking")
print(reply.choices[0].message.content)
"""


def python(program: str, *arguments: str) -> str:
    """A command line that runs Python source."""
    words = " ".join(f"'{argument}'" for argument in arguments)
    quoted = program.replace("'", '"')
    return f"{sys.executable} -c '{quoted}' {words}"


Make = Callable[..., Command]


@pytest.fixture(params=["host", "bubblewrap"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a command of one kind of launcher; it writes `tmp_path`."""
    tmp_path.chmod(0o777)
    sandbox = ProcessSandbox(write=[str(tmp_path)], tmp_bytes=NO_LIMITS.tmp_bytes)
    if request.param == "bubblewrap":
        sandbox = await sandbox.fitted()
        if problem := await sandbox.problem():
            pytest.skip(problem)

    def made(
        command: str, *, limits: ProgramLimits = NO_LIMITS, passed: Sequence[str] = ()
    ) -> Command:
        words = command_words(command)
        launcher: Launcher = BareLauncher(limits)
        if request.param == "bubblewrap":
            launcher = SandboxLauncher(sandbox, limits=limits, words=words)
        return Command(words, launcher=launcher, pass_environment=passed)

    return made


async def answer_of(command: Command, *, sum_is: int = 4) -> str:
    async with ScriptedGateway(replay(text("4"))) as gateway:
        transcript = await command.run(rollout(gateway), SumEpisode(sum_is))
    return transcript.answer


async def test_unmodified_openai_program_reaches_the_model(make: Make) -> None:
    """It needs only the environment; its last line is the answer."""
    async with ScriptedGateway(replay(text("4"))) as gateway:
        command = make(python(AGENT.strip().replace("'", '"'), "{prompt}"))
        transcript = await command.run(rollout(gateway), SumEpisode(4))
    assert (transcript.answer, transcript.turns) == ("4", 1)
    assert gateway.session("token").requests[0][0]["content"] == "What makes 4?"


@pytest.mark.parametrize("printed", ["one\u2028two\x85three", "10 %\rone\u2028two\x85three\r\n"])
async def test_last_line_ends_only_at_line_breaks(make: Make, printed: str) -> None:
    """Line feeds and carriage returns."""
    program = f"import sys; sys.stdout.buffer.write({printed!r}.encode())"
    assert await answer_of(make(python(program))) == "one\u2028two\x85three"


async def test_prompt_is_one_argument_of_the_command(make: Make) -> None:
    """Shell syntax in a prompt stays text."""
    program = "import sys; print(len(sys.argv) - 1, sys.argv[1])"

    class Sly(SumEpisode):
        def __init__(self) -> None:
            super().__init__(4)
            self.messages = [{"role": "user", "content": "'; touch /tmp/x; echo \"$HOME {task_id}"}]

    async with ScriptedGateway(replay(text("4"))) as gateway:
        command = make(python(program, "{prompt}"))
        transcript = await command.run(rollout(gateway), Sly())
    assert transcript.answer == "1 '; touch /tmp/x; echo \"$HOME {task_id}"


async def test_task_variable_holds_no_answer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """FORGE_TASK_JSON has prompt and inputs, neither the payload nor settings."""
    monkeypatch.setenv("FORGE_KEY_FILE", "/secret")
    program = (
        "import json, os\n"
        "task = json.loads(os.environ['FORGE_TASK_JSON'])\n"
        "print(json.dumps([task, 'FORGE_KEY_FILE' in os.environ]))"
    )
    async with ScriptedGateway(replay(text("4"))) as gateway:
        command = make(python(program))
        attempt = rollout(gateway, sum=4, inputs={"repo": "r"})
        transcript = await command.run(attempt, SumEpisode(4))
    task, leaked = json.loads(transcript.answer)
    assert (task["prompt"], task["inputs"]) == ("What makes 4?", {"repo": "r"})
    assert "sum" not in task
    assert not leaked


class TracedRollout:
    """The root span of a rollout, as the runner makes it."""

    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    def set(self, attributes: Mapping[str, Any]) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def end(self) -> None:
        pass


async def test_program_of_a_traced_rollout_gets_its_trace_context(make: Make) -> None:
    """The spans of its own are then below the rollout."""
    command = make(python("import os; print(os.environ.get('TRACEPARENT'))"))
    with as_current(TracedRollout()):
        assert await answer_of(command) == TracedRollout.traceparent
    assert await answer_of(command) == "None"


async def test_no_secret_of_the_runner_reaches_the_program(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables pass by name only; those of the gateway are always there."""
    for name in ("AWS_SECRET_ACCESS_KEY", "FORGE_RUNNER_KEY_FILE", "HTTPS_PROXY", "MY_TOOL"):
        monkeypatch.setenv(name, "secret")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    async with ScriptedGateway(replay(text("4"))) as gateway:
        command = make(python(program), passed=["MY_TOOL"])
        variables = json.loads((await command.run(rollout(gateway), SumEpisode(4))).answer)
    assert [name for name, value in variables.items() if "secret" in value] == ["MY_TOOL"]
    assert variables["PATH"] == os.environ["PATH"]
    assert {"HOME", "TMPDIR", "OPENAI_BASE_URL", "OPENAI_API_KEY"} <= set(variables)


async def test_answer_file_that_is_a_link_is_ignored(make: Make, tmp_path: Path) -> None:
    """It could point to a file that only the runner may read."""
    (tmp_path / "key").write_text("the key")
    program = (
        f"import os; os.symlink({str(tmp_path / 'key')!r}, os.environ['FORGE_ANSWER']); print(4)"
    )
    async with ScriptedGateway(replay(text("4"))) as gateway:
        command = make(python(program))
        transcript = await command.run(rollout(gateway), SumEpisode(4))
    assert transcript.answer == "4"


async def test_answer_file_that_is_a_directory_is_ignored(make: Make) -> None:
    """Like a link; it costs the runner no descriptor."""
    program = "import os; os.mkdir(os.environ['FORGE_ANSWER']); print(4)"
    assert await answer_of(make(python(program))) == "4"


def test_answer_that_is_a_directory_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """A runner reads the answers of many programs."""
    (tmp_path / ANSWER).mkdir()
    before = psutil.Process().num_fds()
    assert [read_answer(tmp_path) for _ in range(8)] == [""] * 8
    assert psutil.Process().num_fds() == before


async def test_anthropic_program_has_one_credential(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session token, for any environment of the runner; the base URL has no /v1."""
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "its-own")
    program = (
        "import json, os\n"
        "print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('ANTHROPIC_')}))"
    )
    async with ScriptedGateway(replay(text("4"))) as gateway:
        attempt = rollout(gateway)
        transcript = await make(python(program)).run(attempt, SumEpisode(4))
    found = json.loads(transcript.answer)
    assert found["ANTHROPIC_BASE_URL"] == attempt.gateway.http_url
    assert found["ANTHROPIC_API_KEY"] == "token"
    assert "ANTHROPIC_AUTH_TOKEN" not in found


async def test_answer_file_takes_precedence_over_output(make: Make) -> None:
    """A program with long output writes its answer to the file of its environment."""
    program = "import os; open(os.environ['FORGE_ANSWER'], 'w').write(' 4\\n'); print('done')"
    assert await answer_of(make(python(program))) == "4"


async def test_kept_output_is_bounded(make: Make) -> None:
    """The end of endless output is kept."""
    program = f"print('x' * {3 * OUTPUT_BYTES}); print('last')"
    assert await answer_of(make(python(program))) == "last"


async def test_failed_program_reports_exit_code_and_last_line(make: Make) -> None:
    """The exit code and the last line of standard error make the error."""
    program = "import sys; print('4'); sys.exit('out of ideas')"
    with pytest.raises(RuntimeError, match="ended with 1: out of ideas"):
        await answer_of(make(python(program)))


async def test_program_killed_by_the_host_is_an_infrastructure_failure(make: Make) -> None:
    """The kernel kills a process if memory runs out; the program has limits of its own."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(ResourceExhausted, match="was killed by SIGKILL"):
        await answer_of(make(python(program)))


async def test_failed_program_logs_more_than_its_last_line(make: Make) -> None:
    """Some runtimes end with a line about themselves; the log has more, bounded."""
    program = (
        "import sys\n"
        "print('asking the model')\n"
        "told = ['noise\\n' * 10_000, 'Error: out of ideas\\n', '\\nRuntime v1.2.3']\n"
        "print(*told, file=sys.stderr)\n"
        "sys.exit(7)"
    )
    with (
        structlog.testing.capture_logs() as logged,
        pytest.raises(RuntimeError, match=r"ended with 7: .*Error: out of ideas \|.*v1\.2\.3"),
    ):
        await answer_of(make(python(program)))
    (event,) = [event for event in logged if event["event"] == "program_failed"]
    assert (event["trajectory_id"], event["returncode"]) == ("token:0:0", 7)
    assert event["stdout"] == ["asking the model"]
    assert event["stderr"][-2:] == [" Error: out of ideas", "Runtime v1.2.3"]
    assert sum(map(len, event["stderr"])) <= LOGGED_CHARS


async def test_task_longer_than_a_command_line_is_a_permanent_failure(make: Make) -> None:
    """What the kernel refuses to pass on, no attempt can mend."""

    class Long(SumEpisode):
        def __init__(self) -> None:
            super().__init__(4)
            self.messages = [{"role": "user", "content": "x" * (1 << 20)}]

    async with ScriptedGateway(replay(text("4"))) as gateway:
        command = make(python("print(4)", "{prompt}"))
        with pytest.raises(InvalidArgument, match="too long for a command line"):
            await command.run(rollout(gateway), Long())


async def test_memory_is_limited(make: Make) -> None:
    """A program that takes more than it may fails by itself."""
    program = "x = bytearray(512 << 20); print('4')"
    with pytest.raises(RuntimeError, match="MemoryError"):
        await answer_of(
            make(python(program), limits=ProgramLimits(memory_bytes=256 << 20, processes=0))
        )


def running(mark: str) -> list[int]:
    """Processes with this word in their command line; a sandbox has other process ids."""
    found = psutil.process_iter(["cmdline"])
    return [each.pid for each in found if mark in (each.info["cmdline"] or ())]


async def test_children_of_a_program_are_ended(make: Make) -> None:
    """A child that outlives the program, and holds its output open, delays nothing."""
    program = (
        "import subprocess, sys\n"
        "sleep = 'import time; time.sleep(600)'\n"
        "subprocess.Popen([sys.executable, '-c', sleep, sys.argv[1]], start_new_session=False)\n"
        "print(4)"
    )
    mark = f"left-running-{os.getpid()}"
    assert await answer_of(make(python(program, mark))) == "4"
    # It is killed by now; it dies when it is next scheduled.
    await until(lambda: not running(mark))


async def test_cancellation_ends_the_program(make: Make, tmp_path: Path) -> None:
    """A rollout that is stopped leaves no process and no directory; the log has its last words."""
    started = tmp_path / "started"
    os.mkfifo(started)
    started.chmod(0o666)
    mark = f"cancelled-{os.getpid()}"
    program = (
        "import os, time\n"
        "print('waiting', flush=True)\n"
        f"open('{started}', 'w').write(os.environ['TMPDIR'])\n"
        "time.sleep(600)"
    )
    before = set(Path(tempfile.gettempdir()).iterdir())
    with structlog.testing.capture_logs() as logged:
        async with ScriptedGateway(replay(text("4"))) as gateway:
            command = make(python(program, mark))
            attempt = asyncio.create_task(command.run(rollout(gateway), SumEpisode(4)))
            directory = Path(await asyncio.to_thread(started.read_text))
            assert running(mark)
            attempt.cancel()
            with pytest.raises(asyncio.CancelledError):
                await attempt
    assert [event["stdout"] for event in logged] == [["waiting"]]
    await until(lambda: not running(mark))
    assert not directory.exists() or directory == Path("/tmp")
    assert not {path.name for path in set(Path(tempfile.gettempdir()).iterdir()) - before} & {
        "work",
        "home",
    }


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "empty"),
        ("agent 'unclosed", "No closing quotation"),
        ("no-such-program-here", "no program 'no-such-program-here'"),
    ],
)
def test_command_that_cannot_run_is_refused_at_start(command: str, said: str) -> None:
    """A wrong setting is an error before any lease."""
    with pytest.raises(ConfigError, match=said):
        command_words(command)
