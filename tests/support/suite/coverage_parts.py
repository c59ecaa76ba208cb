"""`make coverage`: measures the default suite part by part, and combines the parts.

Owns the parts and their files in `.coverage-parts/`. An interrupted measurement continues with the
next part; a part with a failed test is measured again. A change of the code restarts all parts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from coverage import CoverageData

from forge.runtime.process.child_processes import dying_with_parent
from tests.support.suite.coverage_files import delete_damaged

ROOT = Path(__file__).parents[3]
MEASURED = ("forge", "services")
OMITTED = ROOT / "forge" / "v1"
WHOLE = ("tests/contract", "tests/fuzz", "tests/e2e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some test files, measured together."""

    name: str
    paths: tuple[str, ...]

    @property
    def workers(self) -> int:
        """Of pytest: each imports all files, and runs some. Two serve two cores, but where tests
        wait for processes."""
        files = [file for path in self.paths for file in _test_files(ROOT / path)]
        return min(4 if self.name.startswith("integration") else 2, len(files))


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("test_*.py"))


def parts() -> Iterator[Part]:
    """The whole default suite, the shortest tests first."""
    for room in sorted((ROOT / "tests/unit").iterdir()):
        if room.is_dir() and _test_files(room):
            yield Part(name=f"unit-{room.name}", paths=(str(room.relative_to(ROOT)),))
    files = sorted(ROOT.glob("tests/integration/test_*.py"))
    for subject, of_subject in groupby(files, key=lambda file: file.stem.split("_")[1]):
        paths = tuple(str(file.relative_to(ROOT)) for file in of_subject)
        yield Part(name=f"integration-{subject}", paths=paths)
    for folder in WHOLE:
        yield Part(name=Path(folder).name, paths=(folder,))


class Measurement:
    """The files of one measurement, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, state: str) -> None:
        """Keep the finished parts of the same `state` of the code, and nothing else."""
        stored = self._folder / "state"
        if not stored.exists() or stored.read_text() != state:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            stored.write_text(state)

    def finished(self, part: Part) -> bool:
        """True if all tests of the part have passed."""
        return self._file(part).exists()

    def measure(self, part: Part) -> bool:
        """Run the tests of a part; True if all passed. Lines are kept in either case."""
        running = self._folder / f"{part.name}.running"
        shutil.rmtree(running, ignore_errors=True)
        running.mkdir()
        include = ",".join(f"{ROOT / name}/*" for name in MEASURED)
        measured = [f"--data-file={running}/.coverage", f"--include={include}"]
        pytest = ["pytest", "-n", str(part.workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        # Neither `--include` nor the data file of an outer measurement is for these processes.
        environ = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
        ended = subprocess.run(
            dying_with_parent(
                [sys.executable, "-m", "coverage", "run", *measured, "-m", *pytest, *part.paths]
            ),
            env=environ,
            cwd=ROOT,
        )
        passed = ended.returncode == 0
        delete_damaged(running)
        combine(running / ".coverage")
        (running / ".coverage").replace(self._file(part, passed=passed))
        shutil.rmtree(running)
        if passed:
            self._file(part, passed=False).unlink(missing_ok=True)
        return passed

    def report(self) -> None:
        """Print the lines that no part reaches, modules that no part imports included."""
        data = ROOT / ".coverage"
        data.unlink(missing_ok=True)
        combine(data, *sorted(self._folder.glob("*.data")))
        combined = CoverageData(basename=str(data))
        combined.read()
        combined.touch_files([str(file) for file in measured_files()])
        combined.write()
        subprocess.run(
            [sys.executable, "-m", "coverage", "report", "--skip-covered", "--sort=cover"],
            cwd=ROOT,
            check=True,
        )

    def _file(self, part: Part, *, passed: bool = True) -> Path:
        return self._folder / f"{part.name}{'' if passed else '.failed'}.data"


def combine(data: Path, *sources: Path) -> None:
    """Combine the files of all processes into `data`, without `sources` those beside it."""
    words = ("combine", "--keep", "--quiet", f"--data-file={data}", *map(str, sources))
    subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT, check=True)


def measured_files() -> Iterator[Path]:
    """The modules of this project that tests are for."""
    for name in MEASURED:
        for file in sorted((ROOT / name).rglob("*.py")):
            if not file.is_relative_to(OMITTED):
                yield file


def code_of_tests(tests: Path) -> list[Path]:
    """The tests and their support, without the Node packages that `make test-clients` installs."""
    files = sorted(tests.rglob("*.py"))
    return [file for file in files if "node_modules" not in file.relative_to(tests).parts]


def state_of_code() -> str:
    """A digest of the measured code and of its tests."""
    digest = hashlib.sha256()
    for file in [*measured_files(), *code_of_tests(ROOT / "tests")]:
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def main(chosen: Sequence[str], *, folder: Path = ROOT / ".coverage-parts") -> int:
    """Measure the parts whose names begin with one of `chosen`, or all; 1 if a test failed."""
    measurement = Measurement(folder)
    measurement.begin(state_of_code())
    failed = []
    for part in parts():
        if chosen and not part.name.startswith(tuple(chosen)):
            continue
        if measurement.finished(part):
            print(f"{part.name}: measured before", flush=True)
        else:
            print(f"{part.name}: {' '.join(part.paths)}", flush=True)
            if not measurement.measure(part):
                failed.append(part.name)
    measurement.report()
    if failed:
        print(f"tests failed in: {', '.join(failed)}; the next `make coverage` repeats these")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
