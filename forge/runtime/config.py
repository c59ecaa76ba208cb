"""Settings: a frozen dataclass per service, with a nested dataclass for each table.

Owns the sources of settings and the errors of wrong ones. From weak to strong:
TOML file (`--config FILE` or `FORGE_CONFIG`) < `FORGE_<KEY>` < `FORGE_<SERVICE>_<KEY>` < `--key`.
The key `window` of the table `[queue]` is `--queue.window` and `FORGE_QUEUE__WINDOW`.
The annotation of a field has its bounds (`msgspec.Meta`), the string under it is its help.
Not here: the settings of the services; each has its own `config.py`.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
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

    config: str = ""
    """TOML file with settings."""
    print_config: bool = False
    """Print the settings in force as TOML and exit."""
    check: bool = False
    """Check the settings and this host's files and ports, print a line for each problem and exit:
    with 2 if there is one."""
    cluster: str = "default"
    """Name of the cluster; clusters share nothing in etcd."""
    etcd: str = "127.0.0.1:2379"
    """Endpoints of etcd: [https://]host:port, separated by commas."""
    etcd_user: str = ""
    """User in etcd; empty: <cluster>.<service>."""
    etcd_password_file: str = ""
    """File with the password of the user in etcd; empty: etcd demands none."""
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
    audit_file: str = ""
    """File to append the audit log to; empty: to the log, whatever its level."""
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
    accept_differing: bool = False
    """Start although settings that must be equal differ from those of running instances, while a
    change is rolled out; the log names them."""
    clock_tolerance_s: Annotated[float, Meta(ge=0, le=604_800)] = CLOCK_TOLERANCE_S
    """Time after its expiry in which a token is accepted, for hosts whose clocks differ."""

    def validate(self) -> None:
        """Raises `InvalidArgument` for settings that contradict each other."""

    def agreed(self) -> Mapping[str, str]:
        """Return the values on which instances must agree (`forge.runtime.agreed_settings`)."""
        return {}


C = TypeVar("C", bound=ServiceConfig)
_HELP = """usage: {service} [--SETTING VALUE ...]

{purpose}

Each setting may come from, weak to strong: a key of the TOML file (--config FILE or
FORGE_CONFIG), FORGE_<KEY>, {prefix}<KEY>, a flag.
In a variable, __ stands for the dot of a flag.
"""
_NOT_IN_FILE = ("config", "print_config", "check")
_NOUNS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
_NOUNS[tuple[str, ...]] = "a list of texts (a,b,c)"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a config; `owner` is the dataclass with its field."""

    table: str
    name: str
    type: Any
    value: Any
    owner: type[Any]

    @property
    def key(self) -> str:
        """`name`, or `table.name`."""
        return f"{self.table}.{self.name}".removeprefix(".")

    @property
    def text(self) -> str:
        """Help text: the string under the field, as one line."""
        return _texts(self.owner).get(self.name, "")


Known = Mapping[str, Setting]
"""Settings by key."""
Given = Iterator[tuple[str, str, Any]]
"""(source, key, value) of each setting in a source."""


@functools.cache
def _texts(owner: type[Any]) -> dict[str, str]:
    texts = {}
    for base in reversed(owner.__mro__[:-1]):
        for pair in itertools.pairwise(ast.walk(ast.parse(inspect.getsource(base)))):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def load(
    config_type: type[C], *, service: str, argv: Sequence[str], environ: Mapping[str, str]
) -> C:
    """Read all sources and return the config; `--help` and `--print-config` exit with 0.

    Raises ConfigError with a line for each unknown key and wrong value.
    """
    return accepted(*read(config_type, service=service, argv=argv, environ=environ))


def read(
    config_type: type[C], *, service: str, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[C, list[str]]:
    """Read all sources; return the config, not validated, and a line for each wrong setting, which
    has its default. `--help` exits with 0."""
    known = settings_of(config_type())
    prefix = f"FORGE_{service.upper().replace('-', '_')}_"
    if {"--help", "-h"} & {*argv}:
        title = _HELP.format(service=service, purpose=inspect.getdoc(config_type), prefix=prefix)
        print(title + _flag_texts(known), end="")
        sys.exit(0)
    given = itertools.chain(_variables(environ, prefix, known), _flags(argv, known))
    values, wrong = _read(given, known)
    file, printed, check = (values.pop(key, known.pop(key).value) for key in _NOT_IN_FILE)
    in_file, wrong_in_file = _read(_file(file, known), known)
    tables: dict[str, Any] = {"": {"print_config": printed, "check": check}}
    for key, value in (in_file | values).items():
        tables.setdefault(known[key].table, {})[known[key].name] = value
    return msgspec.convert(tables.pop("") | tables, config_type), wrong + wrong_in_file


def accepted(config: C, wrong: Sequence[str]) -> C:
    """Return a validated config; `--print-config` exits with 0. Raises ConfigError."""
    if wrong:
        raise ConfigError("\n".join(wrong))
    try:
        config.validate()
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error
    if config.print_config:
        print(to_toml(config), end="")
        sys.exit(0)
    return config


def settings_of(config: Any, table: str = "") -> dict[str, Setting]:
    """Return the settings of a config by key; those of tables are last."""
    own: dict[str, Setting] = {}
    nested: dict[str, Setting] = {}
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        one = Setting(table, name, kind, getattr(config, name), type(config))
        if is_dataclass(one.value):
            nested |= settings_of(one.value, name)
        else:
            own[one.key] = one
    return own | nested


def to_toml(config: ServiceConfig) -> str:
    """Return the settings as a TOML file that reads back to the same config."""
    lines = []
    settings = [one for key, one in settings_of(config).items() if key not in _NOT_IN_FILE]
    for table, group in itertools.groupby(settings, lambda one: one.table):
        lines += ["", f"[{table}]"] if table else []
        lines += [f"{one.name} = {toml(one.value)}  # {one.text}" for one in group]
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml(name)} = {toml(value[name])}" for name in value) + "}"
    if isinstance(value, float):
        return repr(value)
    # 7f: the only control character that JSON allows and TOML does not.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def allowed(kind: Any) -> str:
    """Return the allowed values of a type, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Mapping:
        return f"a table (a=1,b=2), each {allowed(args[1])}"
    if origin is Annotated:
        noun, bounds = _NOUNS[args[0]], args[1]
        if bounds.gt is not None:
            return f"{noun} above {bounds.gt}"
        least = f"{noun} of at least {bounds.ge}"
        return least if bounds.le is None else f"{noun} from {bounds.ge} to {bounds.le}"
    choices = args if origin is Literal else getattr(kind, "_value2member_map_", ())
    return _NOUNS.get(kind) or "one of " + ", ".join(choices)


def _flag_texts(known: Known) -> str:
    """Return the settings by section: the service's own, each table, those of every service."""
    shared = ServiceConfig.__dataclass_fields__
    lines = []
    for key in sorted(known, key=shared.__contains__):
        one, flag = known[key], key.replace("_", "-")
        title = f"[{one.table}] {inspect.getdoc(one.owner)}".splitlines()[0] if one.table else ""
        title = title or f"Settings of {'every' if key in shared else 'this'} service:"
        lines += [] if f"\n{title}\n" in lines else [f"\n{title}\n"]
        lines.append(f"  --{flag} (default {toml(one.value)}; {allowed(one.type)})\n")
        lines.append(textwrap.indent(textwrap.fill(one.text, 86), " " * 6) + "\n")
    return "".join(lines)


def _read(given: Given, known: Known) -> tuple[dict[str, Any], list[str]]:
    """Return the values by key, and a line for each wrong setting; for an unknown key it names the
    nearest key."""
    values = {}
    wrong = []
    for source, key, value in given:
        if key not in known:
            spellings = _spellings(known)
            near = [spellings[word] for word in difflib.get_close_matches(key, spellings, n=1)]
            hints = [f"did you mean {one} ({allowed(known[one].type)})?" for one in near]
            shown = f" = {value!r}" if value != "" else ""
            hint = "".join(hints) or "see --help"
            wrong.append(f"{source}: there is no setting {key}{shown}; {hint}")
            continue
        kind = known[key].type
        try:
            values[key] = _converted(value, kind)
        except ValueError:
            refused = f"{key} = {value!r} is not allowed: {allowed(kind)}"
            wrong.append(f"{source}: {refused}")
    return values, wrong


def _converted(value: Any, kind: Any) -> Any:
    """Convert a value; a text may be a list `a,b` or a table `a=1,b=2`. Raises ValueError."""
    if not isinstance(value, str):
        return msgspec.convert(value, kind)
    plain: Any = {"yes": "true", "no": "false"}.get(value.lower(), value) if kind is bool else value
    if get_origin(kind) in (tuple, Mapping):
        plain = [part.strip() for part in value.split(",") if part.strip()]
    if get_origin(kind) is Mapping:
        plain = dict([word.strip() for word in part.split("=", 1)] for part in plain)
    return msgspec.convert(plain, kind, strict=False)


def _spellings(known: Known) -> dict[str, str]:
    """Return keys by former flat spellings: `name`, `table`, `table_name`, `tabl_name`."""
    spellings: dict[str, str] = {}
    for key, one in reversed([*known.items()]):
        flat = (f"{one.table}_{one.name}", f"{one.table[:4]}_{one.name}")
        spellings |= dict.fromkeys((one.name, one.table or key, *flat), key)
    return spellings | {key: key for key in known}


def _file(file: str, known: Known) -> Given:
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: is nested too deeply") from None
    for name, value in content.items():
        table = isinstance(value, dict) and name not in known
        for part, one in value.items() if table else ((None, value),):
            yield file, f"{name}.{part}" if table else name, one


def _variables(environ: Mapping[str, str], own: str, known: Known) -> Given:
    spellings = _spellings(known)
    for prefix in ("FORGE_", own):
        for variable, text in environ.items():
            key = variable.removeprefix(prefix).lower().replace("__", ".")
            # A variable without the service's name may be for another service.
            if variable.startswith(prefix) and (prefix == own or key in spellings):
                yield variable, key, text


def _flags(argv: Sequence[str], known: Known) -> Given:
    words = list(argv)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r}: settings are given as --key value; see --help")
        switch = known.get(key.removeprefix("no_"))
        if (
            not equals
            and switch
            and switch.type is bool
            and "".join(words[:1]).lower() not in ("true", "false")
        ):
            text, key = str(key == switch.key), switch.key
        elif not equals and key in known:
            if not words:
                raise ConfigError(f"{flag}: a value must follow")
            text = words.pop(0)
        elif not equals and words and not words[0].startswith("--"):
            # The value of an unknown key: the flags after it are still read.
            words.pop(0)
        yield flag, key, text
