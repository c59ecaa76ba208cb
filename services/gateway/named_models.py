"""Settings of models beside the policy: the tables `[models.NAME]`.

Owns their fields and the rules between them. docs/models.md has an example of each kind.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from forge.core.errors import InvalidArgument
from forge.runtime.serving_groups import check_group

MAX_NAME_BYTES = 128
ANY_NAME = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model beside the policy, under its own name."""

    kind: Literal["version", "engine", "external", "embeddings"]
    """version (older weights of the policy, on a serving group of this cluster), engine (another
    model, on a serving group), external (an API over HTTP), embeddings (an API, for embeddings)."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use."""
    open: bool = False
    """Every session may call the model; otherwise only sessions whose task names it."""
    group: str = ""
    """version, engine: serving group; empty: the name of the model."""
    model_path: str = ""
    """engine: model directory, with the same files as the policy's; the gateway reads no
    weights."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """engine: longest context, prompt and answer; 0: the value in its config.json."""
    tool_format: str = "auto"
    """engine: as in the table model."""
    reasoning_format: str = "auto"
    """engine: as in the table model."""
    url: str = ""
    """external, embeddings: base URL of the API, as its client libraries take it: https, or http on
    the loopback interface."""
    protocol: Literal["openai", "anthropic", "gemini"] = "openai"
    """external: the protocol of the API; the gateway refuses requests of another protocol."""
    key_file: str = ""
    """external, embeddings: file with the API key, closed to other users; empty: no key."""
    upstream: str = ""
    """external, embeddings: name of the model at the API; empty: the name here."""
    timeout_s: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    """external, embeddings: longest time of one call."""
    max_calls: Annotated[int, Meta(ge=1)] = 64
    """external, embeddings: calls in flight, over all sessions of this gateway."""
    max_response_mib: Annotated[float, Meta(ge=0.001, le=1024)] = 32.0
    """external, embeddings: largest answer."""
    recorded_kib: Annotated[int, Meta(ge=0, le=16_384)] = 256
    """Most KiB of a request, and of an external answer, in the record of a call."""

    @property
    def served_here(self) -> bool:
        """Whether engines of this cluster serve it."""
        return self.kind in ("version", "engine")


def check_models(models: Mapping[str, NamedModel], policy_names: Sequence[str]) -> None:
    """Raises `InvalidArgument` for the first wrong table, also for a name used twice."""
    owners = dict.fromkeys(policy_names, "model")
    for name, model in models.items():
        table = f"models.{name}"
        for each in (name, *model.aliases):
            if not 1 <= len(each.encode()) <= MAX_NAME_BYTES or each == ANY_NAME:
                raise InvalidArgument(
                    f"{table}: name {each[:40]!r} must have 1 to {MAX_NAME_BYTES} bytes, and "
                    f"{ANY_NAME!r} is for model.aliases alone"
                )
            if each in owners:
                raise InvalidArgument(f"{table}: name {each!r} is one of [{owners[each]}] too")
            owners[each] = table
        _check(table, name, model)


def _check(table: str, name: str, model: NamedModel) -> None:
    if model.served_here:
        check_group(f"{table}.group", model.group or name)
        engine = model.kind == "engine"
        needed = ["model_path"] if engine else []
        of_others = ["url", "key_file", "upstream", *([] if engine else ["model_path"])]
    else:
        needed, of_others = ["url"], ["group", "model_path"]
    for field in needed:
        if not getattr(model, field):
            raise InvalidArgument(f"{table}.{field} is missing: kind = {model.kind!r} needs it")
    for field in of_others:
        if value := getattr(model, field):
            raise InvalidArgument(f"{table}.{field} = {value!r} is not for kind = {model.kind!r}")
    if model.url:
        _check_url(f"{table}.url", model.url)
    if model.kind == "embeddings" and model.protocol != "openai":
        raise InvalidArgument(
            f"{table}.protocol = {model.protocol!r}: embeddings have OpenAI's protocol"
        )


def _check_url(setting: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidArgument(f"{setting} = {url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidArgument(f"{setting} = {url!r} must begin with https:// and a host")
    if parts.username is not None or parts.password is not None:
        # Not repeated: it may be a secret.
        raise InvalidArgument(f"{setting} must have no user and password: the key is in key_file")
    if parts.query or parts.fragment:
        raise InvalidArgument(f"{setting} = {url!r} must have neither a query nor a fragment")
    if parts.scheme == "http" and not _is_loopback(host):
        raise InvalidArgument(
            f"{setting} = {url!r} would send key and messages in plain text: http:// is for the "
            "loopback interface alone"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
