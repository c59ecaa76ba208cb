"""Settings: one frozen dataclass per service, read once, in `__main__`.

Owns where a setting may come from and what a wrong one says. From weak to strong:
TOML file (`--config FILE` or `FORGE_CONFIG`) < `FORGE_<KEY>` < `FORGE_<SERVICE>_<KEY>` < `--key`.
Not here: the settings of a particular service; each has its own `config.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from forge.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]


def setting(
    default: Any,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A dataclass field that knows what it means and which values it allows."""
    rules = _Rules(help=help, minimum=minimum, maximum=maximum, choices=tuple(choices or ()))
    metadata = {"rules": rules}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


CLOCK_TOLERANCE_S = 86_400.0
"""More than any wrong time zone, less than a wrong date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What every service has."""

    cluster: str = setting("default", help="name of the cluster; clusters share nothing in etcd")
    etcd: str = setting(
        "127.0.0.1:2379", help="etcd endpoints, [https://]host:port separated by commas"
    )
    instance_id: str = setting("", help="unique in its kind; empty: <service>-<host>-<pid>")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(0, help="gRPC port; 0 takes a free one", minimum=0, maximum=65535)
    advertise_host: str = setting("", help="address others reach this host by; empty: host")
    metrics_port: int = setting(
        0, help="port of /metrics; 0 takes a free one", minimum=0, maximum=65535
    )
    log_level: str = setting(
        "info", help="least severe event logged", choices=("debug", "info", "warning", "error")
    )
    log_file: str = setting("", help="file to append JSON lines to; empty: stderr")
    lease_ttl_s: float = setting(
        5.0, help="how long a dead process stays in discovery", minimum=2, maximum=300
    )
    drain_s: float = setting(
        10.0, help="longest wait for work in flight when stopping", minimum=0, maximum=3600
    )
    key_file: str = setting("", help="file with the cluster's signing keys, one a line")
    tls_cert: str = setting("", help="PEM certificate chain of this host")
    tls_key: str = setting("", help="PEM private key of tls_cert")
    tls_ca: str = setting("", help="PEM certificates that other hosts are verified by")
    tls_client_auth: bool = setting(
        True, help="demand a client certificate signed by tls_ca (mutual TLS)"
    )
    insecure: bool = setting(False, help="allow plain TCP beyond the loopback interface")
    clock_tolerance_s: float = setting(
        CLOCK_TOLERANCE_S,
        help="how long after its expiry a token is accepted, for hosts whose clocks differ",
        minimum=0,
        maximum=604_800,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """One setting of one config type, with all that is needed to parse and explain it."""

    name: str
    type: Any
    default: Any
    rules: _Rules

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        if self.rules.choices:
            return "one of " + ", ".join(self.rules.choices)
        low, high = self.rules.minimum, self.rules.maximum
        kind = _KINDS[self.type].label
        if low is not None and high is not None:
            return f"{kind} from {low} to {high}"
        if low is not None:
            return f"{kind} of at least {low}"
        if high is not None:
            return f"{kind} of at most {high}"
        return kind

    def check(self, value: Any, *, source: str) -> Any:
        """The value in the key's type, or ConfigError naming source, key, value and allowed."""
        kind = _KINDS[self.type]
        try:
            parsed = kind.parse(value) if isinstance(value, str) else kind.convert(value)
        except (ValueError, TypeError):
            self._refuse(value, source)
        if self.rules.choices and parsed not in self.rules.choices:
            self._refuse(value, source)
        for number in parsed.values() if isinstance(parsed, dict) else (parsed,):
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            low, high = self.rules.minimum, self.rules.maximum
            # Written so that NaN is refused too.
            if not ((low is None or number >= low) and (high is None or number <= high)):
                self._refuse(value, source)
        return parsed

    def _refuse(self, value: Any, source: str) -> NoReturn:
        raise ConfigError(f"{source}: {self.name} = {value!r} is not allowed: {self.allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    label: str
    parse: Callable[[str], Any]
    """From the text of a flag or a variable (and from a TOML string)."""
    convert: Callable[[Any], Any]
    """From any other TOML value."""


def _parse_bool(text: str) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
        text.lower()
    ]


def _strict_bool(text: str) -> bool:
    try:
        return _parse_bool(text)
    except KeyError:
        raise ValueError(text) from None


def _parse_table(text: str) -> dict[str, float]:
    pairs = (pair.split("=", 1) for pair in text.split(",") if pair.strip())
    return {name.strip(): float(number) for name, number in pairs}


def _exactly(*allowed: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) not in allowed:
            raise TypeError(value)
        return allowed[0](value)

    return convert


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(value)
    return tuple(value)


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError(value)
    return {name: _exactly(float, int)(number) for name, number in value.items()}


_KINDS: dict[Any, _Kind] = {
    str: _Kind(label="text", parse=str, convert=_exactly(str)),
    int: _Kind(label="a whole number", parse=int, convert=_exactly(int)),
    float: _Kind(label="a number", parse=float, convert=_exactly(float, int)),
    bool: _Kind(label="true or false", parse=_strict_bool, convert=_exactly(bool)),
    tuple[str, ...]: _Kind(
        label="a list of texts (a,b,c)",
        parse=lambda text: tuple(item.strip() for item in text.split(",") if item.strip()),
        convert=_strings,
    ),
    dict[str, float]: _Kind(
        label="a table of numbers (a=1,b=2)", parse=_parse_table, convert=_numbers
    ),
}


def load(
    config_type: type[T], *, service: str, argv: Sequence[str], environ: Mapping[str, str]
) -> T:
    """Read every source and return the config; `--help` and `--print-config` exit with 0.

    Raises ConfigError, in one line, for an unknown key or a value that is not allowed.
    """
    keys = _keys(config_type)
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(_help(config_type, service, keys))
        raise SystemExit(0)
    flags, file, print_only = _read_flags(argv, keys)
    file = file or environ.get("FORGE_CONFIG", "")
    values: dict[str, Any] = {}
    if file:
        values |= _read_toml(file, keys)
    values |= _read_environ(environ, service, keys)
    values |= flags
    config = config_type(**values)
    if print_only:
        sys.stdout.write(to_toml(config))
        raise SystemExit(0)
    return config


def to_toml(config: Any) -> str:
    """The effective settings as a TOML file that reads back to the same config."""
    plain, tables = [], []
    for name, key in _keys(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, dict):
            rows = [f"{_toml(part)} = {number!r}" for part, number in value.items()]
            tables.append("\n".join([f"\n[{name}]", *rows]))
        else:
            plain.append(f"{name} = {_toml(value)}  # {key.rules.help}")
    return "\n".join([*plain, *tables]) + "\n"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return '"' + "".join(map(_toml_char, value)) + '"'
        case tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case _:
            return repr(value)


def _toml_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\U{ord(char):08X}"


def _keys(config_type: type[Any]) -> dict[str, _Key]:
    hints = typing.get_type_hints(config_type)
    keys = {}
    for field in dataclasses.fields(config_type):
        kind = hints[field.name]
        if typing.get_origin(kind) in (Mapping, dict):
            kind = dict[str, float]
        assert kind in _KINDS, f"{field.name}: no way to read a {kind}"
        default = field.default
        if not isinstance(field.default_factory, types.NoneType) and callable(
            field.default_factory
        ):
            default = field.default_factory()
        rules = field.metadata.get("rules") or _Rules(
            help="", minimum=None, maximum=None, choices=()
        )
        keys[field.name] = _Key(name=field.name, type=kind, default=default, rules=rules)
    return keys


def _read_toml(file: str, keys: Mapping[str, _Key]) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not TOML: {error}") from None
    return {
        name: _known(name, value, keys, source=file).check(value, source=file)
        for name, value in table.items()
    }


def _read_environ(
    environ: Mapping[str, str], service: str, keys: Mapping[str, _Key]
) -> dict[str, Any]:
    values = {}
    for name, key in keys.items():
        variable = f"FORGE_{name.upper()}"
        if variable in environ:
            values[name] = key.check(environ[variable], source=variable)
    # A variable without the service's name may be meant for another service; one with it may not.
    prefix = f"FORGE_{service.upper().replace('-', '_')}_"
    for variable, text in environ.items():
        if variable.startswith(prefix):
            name = variable.removeprefix(prefix).lower()
            values[name] = _known(name, text, keys, source=variable).check(text, source=variable)
    return values


def _read_flags(argv: Sequence[str], keys: Mapping[str, _Key]) -> tuple[dict[str, Any], str, bool]:
    """(values, --config file, whether --print-config was given)."""
    values: dict[str, Any] = {}
    file, print_only = "", False
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise ConfigError(f"{word!r}: settings are given as --key value; see --help")
        if word == "--print-config":
            print_only = True
            continue
        negated = name.removeprefix("no_")
        if not equals and name != "config" and keys.get(negated, _NO_KEY).type is bool:
            if name == negated and words and words[0].lower() in ("true", "false"):
                values[name] = words.pop(0).lower() == "true"
            else:
                values[negated] = name == negated
            continue
        key = None if name == "config" else _known(name, text, keys, source=flag)
        if not equals:
            if not words:
                raise ConfigError(f"{flag}: a value must follow")
            text = words.pop(0)
        if key is None:
            file = text
        else:
            values[name] = key.check(text, source=flag)
    return values, file, print_only


_NO_KEY = _Key(
    name="", type=str, default="", rules=_Rules(help="", minimum=None, maximum=None, choices=())
)


def _known(name: str, value: Any, keys: Mapping[str, _Key], *, source: str) -> _Key:
    if name in keys:
        return keys[name]
    given = f" = {value!r}" if value != "" else ""
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]} ({keys[near[0]].allowed})?" if near else "see --help"
    raise ConfigError(f"{source}: there is no setting {name}{given}; {hint}")


def _help(config_type: type[Any], service: str, keys: Mapping[str, _Key]) -> str:
    documented = not (config_type.__doc__ or "").startswith(config_type.__name__)
    purpose = (inspect.getdoc(config_type) or "").splitlines() if documented else []
    env = service.upper().replace("-", "_")
    shared = {field.name for field in dataclasses.fields(ServiceConfig)} & keys.keys()
    lines = [
        f"usage: {service} [--config FILE] [--print-config] [--SETTING VALUE ...]",
        "",
        *([*purpose, ""] if purpose else []),
        "Each setting may come from, weak to strong: a key of the TOML file (--config FILE or",
        f"FORGE_CONFIG), FORGE_<KEY>, FORGE_{env}_<KEY>, a flag.",
        "--print-config prints the settings in force as TOML and exits.",
    ]
    for title, wanted in (
        ("settings", keys.keys() - shared),
        ("settings of every service", shared),
    ):
        if wanted:
            lines += ["", f"{title}:"]
        for key in (key for name, key in keys.items() if name in wanted):
            lines.append(f"  {key.flag} (default {_toml(key.default)}; {key.allowed})")
            if key.rules.help:
                lines += textwrap.wrap(
                    key.rules.help, 92, initial_indent=" " * 6, subsequent_indent=" " * 6
                )
    return "\n".join(lines) + "\n"
