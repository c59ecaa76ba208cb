"""Lark grammars of custom tools as regular expressions, or refused with the part at fault."""

from __future__ import annotations

import json
import re

import pytest

from forge.core.errors import InvalidArgument
from forge.core.formats import CallDelta
from forge.grammar.answer_grammar import check_schema
from services.gateway.http.openai.responses.tools import tool_set
from services.gateway.structured_output.lark_pattern import pattern_of
from services.gateway.structured_output.whole_text import whole_text
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.turn_grammars import Judge, grammar_of, request

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk  // two kinds
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
    | "*** End of File" LF
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""
"""With every construct of the grammar of a real agent's patches."""
UPDATE = "*** Begin Patch\n*** Update File: a.py\n@@ def f\n-a\n+b\n*** End Patch"


def matches(definition: str, text: str) -> bool:
    return re.fullmatch(pattern_of(definition, field="f"), text) is not None


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (UPDATE, True),
        (UPDATE + "\n", True),
        ("*** Begin Patch\n*** Add File: a\n+x\n+\n*** End Patch\n", True),
        ("*** Begin Patch\n*** Update File: a\n*** End of File\n*** End Patch", True),
        ("*** Begin Patch\n*** End Patch", False),
        ("*** Begin Patch\n*** Add File: a\nx\n*** End Patch", False),
        (UPDATE.replace("*** Begin", "Begin"), False),
    ],
)
def test_patch_grammar_becomes_an_expression(text: str, allowed: bool) -> None:
    """It matches what the rules derive, and nothing else."""
    assert matches(PATCH, text) is allowed


@pytest.mark.parametrize(
    ("definition", "yes", "no"),
    [
        ('start: "a.b"', "a.b", "axb"),
        ('start: "select"i NAME\nNAME: /[a-z]+/', "SELECTx", "selectX"),
        ('start: "a"~2..3', "aaa", "a"),
        ('start: ["a"] "b"*', "bb", "aa"),
        ('?start: x\n!x.2: "(" x2 ")"\nx2: /\\d+/', "(12)", "()"),
        ('start: "a\\n\\"b"', 'a\n"b', "ab"),
        ("start: /a\\/b/ WORD\n%import common.WORD", "a/bx", "a/b1"),
        ("start: (A | B)+\nA: /x/i\nB: N\n%import common.INT -> N", "xX7", "y"),
        ("start: D W\n%import common (DIGIT, WS)\nD: DIGIT\nW: WS", "1 ", "1"),
    ],
)
def test_lark_constructs_become_expressions(definition: str, yes: str, no: str) -> None:
    """Texts, flags, ranges, optional parts, modifiers, escapes and imports."""
    assert matches(definition, yes)
    assert not matches(definition, no)


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ('start: "(" start ")" | "x"', "'start' contains itself"),
        ("start: missing", "'missing' is not defined"),
        ("begin: /a/", "'start' is not defined"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: X\n%import python.NAME -> X", "python.NAME"),
        ('start: ("a"', "without its end"),
        ('start: "a" )', r"'\)' in rule 'start'"),
        ("start: {", "'{'"),
        ("start", "begins with 'start'"),
        (
            "start: a a\n"
            + "\n".join(
                f"{c}: {d} {d}" for c, d in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
            )
            + "\nq: /0123456789/",
            "longer than",
        ),
        ("x" * 70_000, "longer than 65536"),
        ("start: " + "(" * 20_000, "nested too deeply"),
    ],
)
def test_grammar_without_an_expression_is_refused(definition: str, says: str) -> None:
    """With the field, and the part at fault."""
    with pytest.raises(InvalidArgument, match=rf"^tools\[0\]\.format.*{says}"):
        pattern_of(definition, field="tools[0].format")


def test_the_expression_can_be_enforced_in_json() -> None:
    """llguidance compiles it as the pattern of a string."""
    pattern = f"^(?:{pattern_of(PATCH, field='f')})$"
    schema = {"type": "object", "properties": {"input": {"type": "string", "pattern": pattern}}}
    check_schema(schema, field="f")


@pytest.mark.parametrize("family", ["chatml", "minimax", "kimi", "mistral"])
def test_a_custom_tools_grammar_is_enforced_in_each_call_syntax(family: str) -> None:
    """As JSON, escaped, and as text that nothing escapes: a patch is accepted whole, and a text
    that the grammar does not derive is not."""
    custom = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
    }
    model = make_model(family)
    judge = Judge(
        family,
        grammar_of(model, request(tools=tool_set([custom], omit_web_search=False).tools)),
    )
    for text, verdict in ((UPDATE, "whole"), (UPDATE.replace("*** Begin", "Begin"), "wrong")):
        patched = CallDelta(name="apply_patch", arguments=json.dumps({"input": text}))
        assert judge(model.format.write([patched])) == verdict


@pytest.mark.parametrize(
    ("pattern", "text"), [("^(a|b)$", "b"), (r"^[|]\|(x|(y|z))$", "||z"), ("a|b", "xbx")]
)
def test_alternatives_in_groups_may_stand_beside_anchors(pattern: str, text: str) -> None:
    """They are not divided by an anchor."""
    assert re.fullmatch(whole_text(pattern), text, re.DOTALL)


@pytest.mark.parametrize("pattern", ["^a|b$", "a|b$", "^(a)|(b)", "^a$b$", "^a^b"])
def test_alternatives_that_an_anchor_divides_are_refused(pattern: str) -> None:
    """As are anchors inside."""
    with pytest.raises(ValueError, match="anchors"):
        whole_text(pattern)
