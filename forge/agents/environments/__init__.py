"""Forge's domains by name. The import is cheap: it loads no domain."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from forge.agents.environments.base import Domain
from forge.agents.environments.code import CodeDomain
from forge.agents.environments.general import GeneralDomain
from forge.agents.environments.gym import GYM_DOMAINS
from forge.agents.environments.qa import QaDomain
from forge.agents.environments.reasoning import ReasoningDomain
from forge.core.errors import NotFound

_ALL: tuple[Domain, ...] = (
    ReasoningDomain(),
    QaDomain(),
    CodeDomain(),
    GeneralDomain(),
    *GYM_DOMAINS,
)
DOMAINS: Mapping[str, Domain] = MappingProxyType({domain.name: domain for domain in _ALL})


def get_domain(name: str) -> Domain:
    """Returns the domain with this name. Raises `NotFound` with the known names."""
    if name not in DOMAINS:
        raise NotFound(f"no domain {name!r}; known domains: {', '.join(DOMAINS)}")
    return DOMAINS[name]
