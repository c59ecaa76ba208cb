"""Tests: the surface of each version, its features, and an installed tree against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.core.errors import ConfigError
from services.inference.engines.tensorrt_llm.library.surface import (
    TARGET,
    Feature,
    known_versions,
    load_surface,
    surface_for,
)
from services.inference.engines.tensorrt_llm.library.surface_diff import Difference, Tree, compare
from tests.support.inference.surface_tree import PACKAGE, edit, write_module, write_tree

_LLM = f"{PACKAGE}._torch.async_llm"
_EXECUTOR = f"{PACKAGE}._torch.pyexecutor.py_executor"
_ARGUMENTS = f"{PACKAGE}.llmapi.llm_args"
_SAMPLING = f"{PACKAGE}.sampling_params"


def differences(root: Path, version: str = TARGET) -> list[Difference]:
    return compare(Tree(root), load_surface(version))[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with the surface of the target version."""
    return write_tree(tmp_path, load_surface(TARGET))


def test_target_has_every_feature() -> None:
    """All features follow from the surface of the target version."""
    assert load_surface(TARGET).features() == frozenset(Feature)


def test_stable_version_drains_and_samples_raw() -> None:
    """Of 1.2.1 only what is verified counts: no pause, no hand-off, raw log-probs alone."""
    assert load_surface("1.2.1").verified().features() == frozenset()
    missing = load_surface("1.2.1").verified().missing(Feature.PAUSE)
    assert missing == (
        f"{_LLM}:AsyncLLM.pause_generation",
        f"{_LLM}:AsyncLLM.resume_generation",
        f"{PACKAGE}.llmapi.rlhf_utils:WorkerExtension.wait_for_engine_idle",
    )


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ("1.2.1", "1.2.1"),
        ("1.3.0rc15", "1.2.1"),
        ("1.3.0rc29", "1.3.0rc29"),
        ("1.4.0rc1", "1.3.0rc29"),
    ],
)
def test_version_has_the_newest_surface_that_is_not_newer(installed: str, expected: str) -> None:
    """A release candidate before the target gets the surface of the stable version."""
    assert surface_for(installed).version == expected


@pytest.mark.parametrize("installed", ["1.1.0", "0.21.0", "main"])
def test_version_without_a_surface_is_refused(installed: str) -> None:
    """Versions before the first surface, and what is no version, are errors that name it."""
    with pytest.raises(ConfigError, match=installed):
        surface_for(installed)


@pytest.mark.parametrize("version", known_versions())
def test_tree_of_the_surface_has_no_difference(tmp_path: Path, version: str) -> None:
    """The tree is parsed, its version read, and all of the surface found."""
    tree = Tree(write_tree(tmp_path, load_surface(version)))
    found, effective = compare(tree, load_surface(version))
    assert tree.version() == version
    assert found == []
    assert effective == load_surface(version)


def test_unverified_members_are_taken_from_the_tree(tmp_path: Path) -> None:
    """1.2.1 may have hand-offs under an id of the caller: the tree decides, and neither is a
    difference."""
    surface = load_surface("1.2.1")
    with_them = compare(Tree(write_tree(tmp_path / "with", surface)), surface)
    without = compare(Tree(write_tree(tmp_path / "without", surface.verified())), surface)
    assert with_them[0] == without[0] == []
    assert Feature.DISAGGREGATION in with_them[1].features()
    assert Feature.DISAGGREGATION not in without[1].features()


def test_changed_default_is_a_difference(root: Path) -> None:
    """The adapter leaves max_tokens to nobody, yet a changed default tells a changed library."""
    edit(root, _SAMPLING, "max_tokens: object = 32", "max_tokens: object = 16")
    assert differences(root) == [
        Difference(
            path=f"{_SAMPLING}:SamplingParams.max_tokens", text="the default is 16, expected 32"
        )
    ]


def test_renamed_parameter_is_a_difference_and_costs_the_feature(root: Path) -> None:
    """Without `drain` a control action waits for all requests."""
    edit(root, _EXECUTOR, "control_action(self, drain)", "control_action(self, wait=True)")
    found, effective = compare(Tree(root), load_surface(TARGET))
    assert [one.path for one in found] == [f"{_EXECUTOR}:PyExecutor.control_action.drain"]
    assert found[0].text == "no such parameter; there are: wait"
    assert Feature.UPDATE_WITHOUT_DRAIN not in effective.features()
    assert Feature.PAUSE in effective.features()


def test_new_parameter_without_a_default_is_a_difference(root: Path) -> None:
    """The adapter's calls would fail."""
    edit(root, _LLM, "collective_rpc(self, method,", "collective_rpc(self, method, ranks,")
    assert differences(root) == [
        Difference(
            path=f"{_LLM}:AsyncLLM.collective_rpc.ranks",
            text="is a new parameter without a default",
        )
    ]


def test_method_that_is_no_longer_async_is_a_difference(root: Path) -> None:
    """Its result would be awaited in vain."""
    edit(root, _LLM, "async def pause_generation", "def pause_generation")
    assert [one.text for one in differences(root)] == ["is not async"]


def test_missing_class_names_its_new_module(root: Path) -> None:
    """A class that moved is found, and the difference says where."""
    edit(root, _SAMPLING, "class LogprobMode", "class LogprobModes")
    write_module(root, f"{PACKAGE}.enums", "class LogprobMode:\n    RAW = 'raw'\n")
    assert [one.text for one in differences(root)] == [
        f"no class LogprobMode; LogprobMode is in {PACKAGE}.enums"
    ]


def test_moved_module_names_the_new_place_of_each_class(root: Path) -> None:
    """All classes of a moved module are differences; their features are gone."""
    old = root / "_torch" / "async_llm.py"
    old.rename(root / "async_llm.py")
    found, effective = compare(Tree(root), load_surface(TARGET))
    assert found == [
        Difference(
            path=f"{_LLM}:AsyncLLM",
            text=f"no such module; AsyncLLM is in {PACKAGE}.async_llm",
        )
    ]
    assert Feature.PAUSE not in effective.features()


def test_re_export_and_base_class_are_followed(root: Path) -> None:
    """As the library has it: a forwarding override, a base class of another module, an import under
    try, fields by Field(...)."""
    text = (root / "_torch" / "async_llm.py").read_text()
    write_module(root, f"{PACKAGE}.llmapi.llm", text.replace("class AsyncLLM", "class LLM"))
    write_module(
        root,
        _LLM,
        "try:\n"
        "    from ..llmapi.llm import LLM\n"
        "except ImportError:\n"
        "    raise\n"
        "class AsyncLLM(LLM):\n"
        "    def generate_async(self, *args, **kwargs): ...\n",
    )
    edit(root, _SAMPLING, "max_tokens: object = 32", "max_tokens: int = Field(default=32, gt=0)")
    assert differences(root) == []


def test_second_name_of_a_class_is_followed(root: Path) -> None:
    """As the library keeps CudaGraphConfig, with the fields in a base class."""
    edit(root, _ARGUMENTS, "class CudaGraphConfig:", "class BaseGraphs:")
    write = (
        "\nclass DecodeGraphs(BaseGraphs):\n    mode = 'decode'\nCudaGraphConfig = DecodeGraphs\n"
    )
    file = root / "llmapi" / "llm_args.py"
    file.write_text(file.read_text() + write)
    found, effective = compare(Tree(root), load_surface(TARGET))
    assert found == []
    assert Feature.CUDA_GRAPHS in effective.features()
    file.write_text(file.read_text().replace("CudaGraphConfig = DecodeGraphs", "A = B\nB = A"))
    assert Feature.CUDA_GRAPHS not in compare(Tree(root), load_surface(TARGET))[1].features()


def test_nothing_of_the_tree_is_executed(root: Path) -> None:
    """A module that cannot be imported is parsed all the same; one that cannot be parsed lacks
    all."""
    edit(root, _SAMPLING, "class SamplingParams", "raise SystemExit\nclass SamplingParams")
    assert differences(root) == []
    (root / "sampling_params.py").write_text("class SamplingParams(:\n")
    assert [one.text for one in differences(root)] == 2 * ["no such module"]
