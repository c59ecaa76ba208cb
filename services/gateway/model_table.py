"""The models that requests may name: the policy, and those of the settings.

Owns the names and who may use them. A task names its models; without names its sessions have those
that are open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forge.core.errors import ConfigError
from forge.runtime.security.tokens import Claims
from services.gateway.errors import ModelNotAllowed, UnknownModel
from services.gateway.external.api import ExternalApi
from services.gateway.named_models import ANY_NAME
from services.gateway.turns.run import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model beside the policy."""

    name: str
    aliases: tuple[str, ...]
    open: bool
    served: Turns | ExternalApi


class ModelTable:
    """All models of a gateway."""

    def __init__(
        self, policy: Turns, policy_names: Sequence[str], entries: Iterable[ModelEntry] = ()
    ) -> None:
        """`policy_names` are in the order of the list of models; "*": any other name. Raises
        `ConfigError` for an entry with a name of the policy."""
        self._policy = policy
        self._policy_names = tuple(dict.fromkeys(policy_names))
        self._entries = tuple(entries)
        self._by_name = {
            name: entry for entry in self._entries for name in (entry.name, *entry.aliases)
        }
        for name in self._policy_names:
            if name in self._by_name:
                raise ConfigError(
                    f"models.{self._by_name[name].name}: name {name!r} is one of the policy too"
                )
        self.has_external = any(isinstance(one.served, ExternalApi) for one in self._entries)

    def find(self, claims: Claims, name: str) -> Turns | ExternalApi:
        """Returns the model of a name. Raises `UnknownModel`, `ModelNotAllowed`."""
        if name in self._policy_names:
            return self._policy
        entry = self._by_name.get(name)
        if entry is not None:
            if not _allows(claims, entry):
                raise ModelNotAllowed(_refusal(claims, name))
            return entry.served
        if ANY_NAME in self._policy_names:
            return self._policy
        shown = self._shown(claims)
        raise UnknownModel(
            f"model {name[:100]!r} is not served here; {', '.join(map(repr, shown))} "
            f"{'is' if len(shown) == 1 else 'are'}"
        )

    def turns(self, claims: Claims, name: str) -> Turns:
        """Returns a model that engines of this cluster serve. Raises the errors of `find`,
        `InvalidArgument` for an external API."""
        found = self.find(claims, name)
        if isinstance(found, ExternalApi):
            # Only requests of its own protocol reach it, as they are.
            raise found.refusal()
        return found

    def turns_or_policy(self, claims: Claims, name: str) -> Turns:
        """As `turns`; the policy without a name, for protocols in which it may be absent."""
        return self.turns(claims, name) if name else self._policy

    def usable(self, claims: Claims) -> list[tuple[str, Turns | ExternalApi]]:
        """Returns all names that a session may use, those of the policy first."""
        own = [(name, self._policy) for name in self._policy_names if name != ANY_NAME]
        others = [
            (name, entry.served)
            for entry in self._entries
            if _allows(claims, entry)
            for name in (entry.name, *entry.aliases)
        ]
        return [*own, *others]

    def _shown(self, claims: Claims) -> list[str]:
        """Returns the usable names without the policy's other names."""
        policy = set(self._policy_names) - {self._policy.model.name}
        return [name for name, _ in self.usable(claims) if name not in policy]


def _allows(claims: Claims, entry: ModelEntry) -> bool:
    if claims.models:
        return any(name in claims.models for name in (entry.name, *entry.aliases))
    return entry.open


def _refusal(claims: Claims, name: str) -> str:
    if claims.models:
        return f"model {name!r} is not for this session: its task has models = {[*claims.models]}"
    return (
        f"model {name!r} is not for this session: its task names no models, and [models] of the "
        "gateway does not say open = true"
    )
