"""Settings: a frozen dataclass per service, with a nested dataclass for each table.

Owns the sources of settings and the errors of wrong ones. From weak to strong:
TOML file (`--config FILE` or `FORGE_CONFIG`) < `FORGE_<KEY>` < `FORGE_<SERVICE>_<KEY>` < `--key`.
The key `window` of the table `[queue]` is `--queue.window` and `FORGE_QUEUE__WINDOW`.
The annotation of a field has its bounds (`msgspec.Meta`), the string under it is its help.
Not here: the settings of the services; each has its own `config.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import json
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from forge.core.errors import ConfigError, InvalidArgument

Port = Annotated[int, Meta(ge=0, le=65535)]
CLOCK_TOLERANCE_S = 86_400.0
"""More than any wrong time zone, less than a wrong date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Settings of every service."""

    cluster: str = "default"
    """Name of the cluster; clusters share nothing in etcd."""
    etcd: str = "127.0.0.1:2379"
    """Endpoints of etcd: [https://]host:port, separated by commas."""
    instance_id: str = ""
    """Unique in its kind; empty: <service>-<host>-<pid>."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port of gRPC; 0 takes a free one."""
    advertise_host: str = ""
    """Address at which others reach this host; empty: host."""
    metrics_port: Port = 0
    """Port of /metrics; 0 takes a free one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event in the log."""
    log_file: str = ""
    """File to append JSON lines to; empty: stderr."""
    lease_ttl_s: Annotated[float, Meta(ge=2, le=300)] = 5.0
    """Time that a dead process stays in discovery."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Longest wait for work in flight when the process stops."""
    key_file: str = ""
    """File with the cluster's signing keys, one a line."""
    tls_cert: str = ""
    """PEM certificate chain of this host."""
    tls_key: str = ""
    """PEM private key of tls_cert."""
    tls_ca: str = ""
    """PEM certificates that verify other hosts."""
    tls_client_auth: bool = True
    """Demand a client certificate signed by tls_ca (mutual TLS)."""
    insecure: bool = False
    """Allow plain TCP beyond the loopback interface."""
    accept_unsigned: bool = False
    """Accept directory entries without a signature, while services of an earlier release run."""
    clock_tolerance_s: Annotated[float, Meta(ge=0, le=604_800)] = CLOCK_TOLERANCE_S
    """Time after its expiry in which a token is accepted, for hosts whose clocks differ."""

    def validate(self) -> None:
        """Raises `InvalidArgument` for settings that contradict each other."""


C = TypeVar("C", bound=ServiceConfig)
Given = Iterator[tuple[str, str, Any]]
"""(source, key, value) of each setting in a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a config, with its type, value, help and bounds."""

    key: str
    """`name`, or `table.name`."""
    type: Any
    value: Any
    owner: type[Any] = ServiceConfig
    """The dataclass with the field."""

    @property
    def table(self) -> str:
        """Name of the table; empty without one."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Key without the table."""
        return self.key.rpartition(".")[2]

    @property
    def text(self) -> str:
        """Help text: the string under the field."""
        return _texts(self.owner).get(self.name, "")

    @property
    def allowed(self) -> str:
        """Allowed values, in words."""
        return _allowed(self.type)

    @property
    def toml(self) -> str:
        """Value as TOML."""
        return _toml(self.value)

    def read(self, value: Any, source: str) -> Any:
        """Return the value in the setting's type. Raises ConfigError."""
        try:
            plain = _split(value, self.type) if isinstance(value, str) else value
            return msgspec.convert(plain, self.type, strict=not isinstance(value, str))
        except ValueError:
            refused = f"{self.key} = {value!r} is not allowed: {self.allowed}"
            raise ConfigError(f"{source}: {refused}") from None


def load(
    config_type: type[C], *, service: str, argv: Sequence[str], environ: Mapping[str, str]
) -> C:
    """Read all sources and return the config; `--help` and `--print-config` exit with 0.

    Raises ConfigError, in one line, for an unknown key or a wrong value.
    """
    default = config_type()
    known = settings_of(default)
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(_help(default, service))
        raise SystemExit(0)
    extra = (("config", str), ("print_config", bool))
    words = known | {key: Setting(key=key, type=kind, value="") for key, kind in extra}
    flags = _read(_flags(argv, words), words)
    file = flags.pop("config", "") or environ.get("FORGE_CONFIG", "")
    print_only = flags.pop("print_config", False)
    values = _read(_file(file, known) if file else iter(()), known)
    values |= _read(_variables(environ, service, known), known)
    try:
        config: C = _changed(default, values | flags)
        config.validate()
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error
    if print_only:
        sys.stdout.write(to_toml(config))
        raise SystemExit(0)
    return config


def to_toml(config: ServiceConfig) -> str:
    """Return the settings as a TOML file that reads back to the same config."""
    lines = []
    settings = sorted(settings_of(config).values(), key=lambda one: one.table != "")
    for table, group in itertools.groupby(settings, lambda one: one.table):
        lines += ["", f"[{table}]"] if table else []
        lines += [f"{one.name} = {one.toml}  # {one.text}" for one in group]
    return "\n".join(lines) + "\n"


def settings_of(table: Any, prefix: str = "") -> dict[str, Setting]:
    """Return the settings of a config by key."""
    found: dict[str, Setting] = {}
    types = get_type_hints(type(table), include_extras=True)
    for field in dataclasses.fields(table):
        key, value = prefix + field.name, getattr(table, field.name)
        if dataclasses.is_dataclass(value):
            found |= settings_of(value, key + ".")
        else:
            found[key] = Setting(key=key, type=types[field.name], value=value, owner=type(table))
    return found


def _changed(table: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the config with these values by key."""
    changes = {}
    for field in dataclasses.fields(table):
        key, value = prefix + field.name, getattr(table, field.name)
        nested = dataclasses.is_dataclass(value)
        changes[field.name] = (
            _changed(value, values, key + ".") if nested else values.get(key, value)
        )
    return dataclasses.replace(table, **changes)


@functools.cache
def _texts(owner: type[Any]) -> dict[str, str]:
    """Return the string under each field of a dataclass, from its source, as one line."""
    texts = {}
    for base in reversed(owner.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for pair in itertools.pairwise(definition.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def _split(text: str, kind: Any) -> Any:
    """Split a list `a,b` and a table `a=1,b=2`; other texts stay."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if get_origin(kind) is Mapping:
        return dict([word.strip() for word in part.split("=", 1)] for part in parts)
    if kind is bool:
        return {"yes": "true", "no": "false"}.get(text.lower(), text)
    return parts if get_origin(kind) is tuple else text


_NOUNS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple[str, ...]: "a list of texts (a,b,c)",
}


def _allowed(kind: Any) -> str:
    """Return the allowed values of a type, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(args)
    if isinstance(kind, enum.EnumType):
        return "one of " + ", ".join(kind._value2member_map_)
    if origin is Mapping:
        return f"a table (a=1,b=2), each {_allowed(args[1])}"
    if origin is not Annotated:
        return _NOUNS[kind]
    noun, bounds = _NOUNS[args[0]], args[1]
    if bounds.gt is not None:
        return f"{noun} above {bounds.gt}"
    if bounds.le is None:
        return f"{noun} of at least {bounds.ge}"
    return f"{noun} from {bounds.ge} to {bounds.le}"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(name)} = {_toml(value[name])}" for name in value) + "}"
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
    # The only control character that JSON allows and TOML does not.
    return text.replace("\x7f", "\\u007f")


def _read(given: Given, known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values by key. Raises ConfigError; for an unknown key it names the nearest key."""
    values = {}
    for source, key, value in given:
        if key not in known:
            spellings = _spellings(known)
            near = difflib.get_close_matches(key, spellings, n=1, cutoff=0.6)
            meant = known[spellings[near[0]]] if near else None
            hint = f"did you mean {meant.key} ({meant.allowed})?" if meant else "see --help"
            shown = f" = {value!r}" if value != "" else ""
            raise ConfigError(f"{source}: there is no setting {key}{shown}; {hint}")
        values[key] = known[key].read(value, source)
    return values


def _spellings(known: Iterable[str]) -> dict[str, str]:
    """Return keys by other spellings: `name`, `table`, `table_name`, and `tabl_name`.

    They include former flat keys: `optimizer`, `learning_rate`, `lora_rank`, `eval_tasks`.
    """
    found: dict[str, str] = {}
    for key in reversed([*known]):
        table, _, name = key.rpartition(".")
        found |= dict.fromkeys((name, table or name, f"{table}_{name}", f"{table[:4]}_{name}"), key)
    return found | {key: key for key in known}


def _file(file: str, known: Iterable[str]) -> Given:
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not TOML: {error}") from None
    for name, value in content.items():
        if isinstance(value, dict) and any(key.startswith(name + ".") for key in known):
            yield from ((file, f"{name}.{part}", one) for part, one in value.items())
        else:
            yield file, name, value


def _variables(environ: Mapping[str, str], service: str, known: Iterable[str]) -> Given:
    own = _prefix(service)
    spellings = _spellings(known)
    for prefix in ("FORGE_", own):
        for variable, text in environ.items():
            key = variable.removeprefix(prefix).lower().replace("__", ".")
            # A variable without the service's name may be for another service.
            if variable.startswith(prefix) and (prefix == own or key in spellings):
                yield variable, key, text


def _prefix(service: str) -> str:
    return f"FORGE_{service.upper().replace('-', '_')}_"


def _flags(argv: Sequence[str], known: Mapping[str, Setting]) -> Given:
    words = list(argv)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r}: settings are given as --key value; see --help")
        switch = known.get(key.removeprefix("no_"))
        if not equals and switch and switch.type is bool:
            text, key = str(key == switch.key), switch.key
            if words and words[0].lower() in ("true", "false"):
                text = words.pop(0)
        elif not equals and key in known:
            if not words:
                raise ConfigError(f"{flag}: a value must follow")
            text = words.pop(0)
        yield flag, key, text


def _help(default: ServiceConfig, service: str) -> str:
    purpose = inspect.getdoc(default) or ""
    lines = [
        f"usage: {service} [--config FILE] [--print-config] [--SETTING VALUE ...]",
        "",
        *([] if purpose.startswith(type(default).__name__) else [purpose, ""]),
        "Each setting may come from, weak to strong: a key of the TOML file (--config FILE or",
        f"FORGE_CONFIG), FORGE_<KEY>, {_prefix(service)}<KEY>, a flag.",
        "In a variable, __ stands for the dot of a flag.",
        "--print-config prints the settings in force as TOML and exits.",
    ]
    shared = ServiceConfig.__dataclass_fields__.keys()
    for title, settings in itertools.groupby(
        sorted(settings_of(default).values(), key=lambda one: (one.key in shared, one.table != "")),
        lambda one: "settings of every service" if one.key in shared else one.table or "settings",
    ):
        lines += ["", f"{title}:"]
        for one in settings:
            flag = "--" + one.key.replace("_", "-")
            lines.append(f"  {flag} (default {one.toml}; {one.allowed})")
            lines.append(textwrap.indent(textwrap.fill(one.text, 86), " " * 6))
    return "\n".join(lines) + "\n"
