"""Arguments of commands that argparse reads: errors of one line, and help pages with defaults."""

from __future__ import annotations

import pytest

from forge.runtime.settings.arguments import COUNT, OneLineParser


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="forge bake", description="Bakes.")
    parser.add_argument("--recipe", required=True, help="file of the recipe")
    parser.add_argument("--trays", type=COUNT, default=3, help="number of trays")
    parser.add_argument("--fan", action="store_true", help="turn the fan on")
    return parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recpie", "x"], "no such option --recpie (did you mean --recipe?)"),
        (["--recpie=x"], "no such option --recpie (did you mean --recipe?)"),
        (["--recipe", "x", "--xyzzy"], "no such option --xyzzy"),
        (["--trays", "2"], "the following arguments are required --recipe"),
        (["--recipe", "x", "--trays", "0"], "--trays '0' is not allowed: a whole number of at"),
    ],
)
def test_wrong_argument_is_one_line_with_the_near_spelling(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelled option is named, and not the required one that is then missing."""
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(words)
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert printed.startswith(f"forge bake: {said}")
    assert printed.endswith("; see forge bake --help\n")
    assert printed.count("\n") == 1


def test_options_may_be_shortened() -> None:
    """As argparse permits it."""
    assert _parser().parse_args(["--rec", "x", "--tray=4"]).trays == 4


def test_help_page_has_defaults() -> None:
    """Only of options that have one."""
    page = " ".join(_parser().format_help().split())
    assert "number of trays (default: 3)" in page
    assert page.count("(default") == 1
