"""The reasoning-gym domains: tasks, the shared prompt, exact scores."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest
import reasoning_gym

from forge.agents.environments import get_domain, gym
from forge.agents.environments.base import Transcript
from forge.agents.environments.gym import GYM_DOMAINS, MAX_TOKENS, GymDomain
from forge.core.errors import FailedPrecondition, InvalidArgument

every_domain = pytest.mark.parametrize("domain", GYM_DOMAINS, ids=lambda domain: domain.name)


def outcome(domain: GymDomain, payload: dict[str, object], answer: str) -> float:
    (reward,) = domain.episode(payload).score(Transcript(answer=answer, turns=1))
    assert reward.kind == "outcome"
    return reward.value


@every_domain
def test_a_task_is_a_function_of_its_seed(domain: GymDomain) -> None:
    """The same seed gives the same task; different seeds give different ones."""
    tasks = [domain.generate(Random(seed)) for seed in range(20)]
    assert tasks == [domain.generate(Random(seed)) for seed in range(20)]
    assert len({task["question"] for task in tasks}) > 10
    assert {task["max_tokens"] for task in tasks} == {MAX_TOKENS}


@every_domain
def test_examples_are_right_and_phrased_like_the_tasks(domain: GymDomain) -> None:
    """The package's verifier accepts each example's answer, and no task repeats one."""
    dataset = reasoning_gym.create_dataset(domain.name, seed=0, size=1, **domain.options)
    shown = {question for question, _ in domain.examples}
    for question, answer in domain.examples:
        assert question[:12] == dataset[0]["question"][:12]
        assert dataset.score_answer(answer, entry=_entry(domain, question)) == 1.0
    assert shown.isdisjoint(domain.generate(Random(seed))["question"] for seed in range(300))


def _entry(domain: GymDomain, question: str) -> dict[str, object]:
    """The example as an entry of the package, with a computed answer."""
    import math
    import re

    numbers = [int(number) for number in re.findall(r"\d+", question)]
    match domain.name:
        case "chain_sum":
            answer = numbers[0] + numbers[1] * (1 if "+" in question else -1)
        case "products":
            answer = math.prod(numbers)
        case "gcd":
            answer = math.gcd(*numbers)
        case _:
            letter, span = re.findall(r'"([^"]*)"', question)
            answer = span.count(letter)
    return {"question": question, "answer": str(answer), "metadata": {}}


@every_domain
def test_all_prompts_share_the_examples(domain: GymDomain) -> None:
    """Every prompt of a domain begins with the same messages; only the last differs."""
    first, second = (domain.episode(domain.generate(Random(seed))).messages for seed in (1, 2))
    assert first[:-1] == second[:-1]
    assert [message["role"] for message in first] == ["user", "assistant"] * 3 + ["user"]


@every_domain
def test_only_the_exact_answer_counts(domain: GymDomain) -> None:
    """White space around it, a full stop and later lines are allowed."""
    payload = domain.generate(Random(3))
    right = payload["answer"]
    for answer in (right, f" {right}\n", f"{right}.", f"{right}\nbecause"):
        assert outcome(domain, payload, answer) == 1.0
    for answer in ("", f"The answer is {right}", f"{right}0", f"{right} or so"):
        assert outcome(domain, payload, answer) == 0.0


def test_payload_without_a_question_is_refused() -> None:
    """The missing key is named."""
    with pytest.raises(InvalidArgument, match="'question'"):
        get_domain("gcd").episode({"answer": "1"})


def test_registry_imports_no_slow_package() -> None:
    """reasoning-gym is imported with the first task, not with the list of domains."""
    program = (
        "import sys, forge.agents.environments as e; e.get_domain('gcd');"
        "sys.exit('reasoning_gym' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_missing_package_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not in the extra `agents`: a package below it needs a C compiler to install."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym._dataset.cache_clear()
    with pytest.raises(FailedPrecondition, match=r"gcd .*forge-rl\[gym\]"):
        get_domain("gcd").generate(Random(1))
