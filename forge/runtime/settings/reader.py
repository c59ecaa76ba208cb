"""Reads settings: a frozen dataclass per service, with a nested dataclass for each table.

Owns the sources, the errors of wrong settings, and the settings as TOML. From weak to strong:
TOML file (`--config FILE` or `FORGE_CONFIG`) < `FORGE_<KEY>` < `FORGE_<SERVICE>_<KEY>` < `--key`.
The annotation of a field has its bounds (`msgspec.Meta`), the string under it is its help. A
mapping to a dataclass is tables by name, `[models.NAME]`; in flags and variables a JSON object.
Not here: the settings (`service_config`, and the `config.py` of each service).
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from forge.core.errors import ConfigError, ForgeError, InvalidArgument, raise_all
from forge.runtime.settings.service_config import ServiceConfig

C = TypeVar("C", bound=ServiceConfig)
_NOT_IN_FILE = ("config", "print_config", "check")
_NOUNS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
_NOUNS[tuple[str, ...]] = "a list of texts (a,b,c)"
_HELP = """usage: {program} [--config FILE] [--print-config | --check] [--SETTING VALUE ...]

{purpose}

Sources of a setting, the later ones win: FILE, FORGE_<KEY>, {own}<KEY>, a flag. For example
sample_ratio of the table [tracing] is FORGE_TRACING__SAMPLE_RATIO and --tracing.sample-ratio.
FILE with all defaults:
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a config or of one of its tables; `owner` is the dataclass with the field."""

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
        """Help: the string under the field, as one line."""
        return _texts(self.owner).get(self.name, "")


Known = Mapping[str, Setting]
"""Settings by key."""
Given = tuple[str, str, Any]
"""Source, key and value."""


@functools.cache
def _texts(owner: type[Any]) -> dict[str, str]:
    texts = {}
    for base in reversed(owner.__mro__[:-1]):
        for pair in itertools.pairwise(ast.walk(ast.parse(inspect.getsource(base)))):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def settings_of(config: Any, table: str = "") -> dict[str, Setting]:
    """Return the settings of a config by key; those of tables are last."""
    kinds = get_type_hints(type(config), include_extras=True)
    fields = [Setting(table, one, kinds[one], getattr(config, one), type(config)) for one in kinds]
    settings = {one.key: one for one in fields if not is_dataclass(one.value)}
    for one in fields:
        settings |= settings_of(one.value, one.name) if is_dataclass(one.value) else {}
    return settings


def fields_of(kind: Any, table: str) -> dict[str, Setting]:
    """Return the fields of tables by name as settings, by key: a required one has the value None.
    Nothing for a setting of another kind."""
    row = get_args(kind)[1] if get_origin(kind) is Mapping else None
    if not is_dataclass(row) or not isinstance(row, type):
        return {}
    required = [one.name for one in fields(row) if one.default is one.default_factory is MISSING]
    return settings_of(row(**dict.fromkeys(required)), table)


def load(
    config_type: type[C],
    *,
    service: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    host_problems: Callable[[C], Iterable[ForgeError]] = lambda _: (),
) -> C:
    """Return the validated settings; `--help`, `--print-config` and `--check` exit with 0.

    `--check` asks for `host_problems` besides. Raises `ForgeError` with a line for each problem,
    `ConfigError` for wrong settings.
    """
    known = settings_of(config_type())
    own = f"FORGE_{service.upper().replace('-', '_')}_"
    if {"--help", "-h"} & {*argv}:
        program, purpose = config_type.program(), inspect.getdoc(config_type)
        head = _HELP.format(program=program, purpose=purpose, own=own)
        print(head + to_toml(config_type()), end="")
        sys.exit(0)
    given = [*_variables(environ, own, known), *_flags(argv, known)]
    file = next((value for _, key, value in reversed(given) if key == "config"), "")
    named = [one for one in given if one[1] != "config"]
    wrong: list[ForgeError] = []
    tables = _read([*_file(file, known), *named], known, wrong, config_type.removed())
    config = msgspec.convert(tables.pop("", {}) | tables, config_type)
    if config.check:
        raise_all([*wrong, *host_problems(config)])
        sys.exit(0)
    try:
        raise_all(wrong)
        config.validate()
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error
    if config.print_config:
        print(to_toml(config), end="")
        sys.exit(0)
    return config


def to_toml(config: ServiceConfig) -> str:
    """Return the settings as a TOML file that reads back to the same config."""
    lines = []
    for title, settings in itertools.groupby(settings_of(config).values(), _title):
        lines.append(title)
        for one in settings:
            if one.key not in _NOT_IN_FILE:
                words = f"{one.text} ({allowed(one.type)})"
                lines.append(textwrap.fill(words, 98, initial_indent="# ", subsequent_indent="# "))
                lines.append(f"{one.name} = {toml(one.value)}")
    return "\n".join(lines) + "\n"


def _title(one: Setting) -> str:
    if one.table:
        return f"\n[{one.table}]\n# {inspect.getdoc(one.owner)}".partition("\n\n")[0]
    shared = one.name in ServiceConfig.__dataclass_fields__
    return f"\n# Settings of {'every' if shared else 'this'} service:"


def toml(value: Any) -> str:
    """Return a value as TOML."""
    value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(name)} = {toml(value[name])}" for name in value) + "}"
    # 7f: the only control character that JSON allows and TOML does not.
    text = msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else text


def allowed(kind: Any) -> str:
    """Return the allowed values of a type, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if named := fields_of(kind, ""):
        return f"tables by name, each with {', '.join(named)}"
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


def _read(
    given: Iterable[Given], known: Known, wrong: list[ForgeError], removed: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values by table and name; adds an error to `wrong` for each wrong setting."""
    tables: dict[str, Any] = {}
    for source, key, value in given:
        one = known.get(key)
        try:
            if one is None:
                hint = removed.get(key) or _hint(key, known)
                raise ConfigError(f"there is no setting {key} = {value!r}; {hint}")
            named = fields_of(one.type, key)
            read = _rows(source, one, value, wrong) if named else _converted(value, one.type)
            tables.setdefault(one.table, {})[one.name] = read
        except ConfigError as error:
            wrong.append(ConfigError(f"{source}: {error}"))
        except ValueError:
            text = f"{key} = {value!r} is not allowed: {allowed(known[key].type)}"
            wrong.append(ConfigError(f"{source}: {text}"))
    return tables


def _rows(source: str, setting: Setting, value: Any, wrong: list[ForgeError]) -> dict[str, Any]:
    """Return tables by name. Raises `ConfigError` for a value of another form."""
    try:
        tables = msgspec.json.decode(value) if isinstance(value, str) else value
        tables = msgspec.convert(tables, dict[str, dict[str, Any]])
    except (ValueError, RecursionError) as error:
        named = f"tables [{setting.key}.NAME]: {error}"
        raise ConfigError(f"{setting.key} = {value!r:.80} is not allowed: {named}") from None
    rows: dict[str, Any] = {}
    for name, table in tables.items():
        prefix = f"{setting.key}.{name}"
        known = fields_of(setting.type, prefix)
        given = [(source, f"{prefix}.{field}", own) for field, own in table.items()]
        fields = _read(given, known, wrong, {}).get(prefix, {})
        missing = [one for one in known.values() if one.value is None and one.name not in table]
        wrong += [
            ConfigError(f"{source}: {one.key} is missing: {allowed(one.type)}") for one in missing
        ]
        if fields.keys() == table.keys() and not missing:
            rows[name] = get_args(setting.type)[1](**fields)
    return rows


def _hint(key: str, known: Known) -> str:
    spellings = _initials(known) | _spellings(known)
    for near in difflib.get_close_matches(key, spellings, n=1):
        one = known[spellings[near]]
        return f"did you mean {one.key} ({allowed(one.type)})?"
    return "see --help"


def _initials(known: Known) -> dict[str, str]:
    """Return keys by the initials of their names: `lr`, `optimizer.lr`."""
    initials: dict[str, str] = {}
    for key, one in reversed([*known.items()]):
        if "_" in one.name:
            short = "".join(word[:1] for word in one.name.split("_"))
            initials |= {short: key, f"{one.table}.{short}": key}
    return initials


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


def _file(file: str, known: Known) -> Iterator[Given]:
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8-sig")) if file else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', error)}") from None
    for name, value in content.items():
        is_table = isinstance(value, dict) and name not in known
        for part, one in value.items() if is_table else [("", value)]:
            yield file, f"{name}.{part}".removesuffix("."), one


def _variables(environ: Mapping[str, str], own: str, known: Known) -> Iterator[Given]:
    spellings = _spellings(known)
    for prefix in ("FORGE_", own):
        for variable, text in environ.items():
            key = variable.removeprefix(prefix).lower().replace("__", ".")
            # A variable without the service's name may be for another service.
            if variable.startswith(prefix) and (prefix == own or key in spellings):
                yield variable, key, text


def _flags(argv: Sequence[str], known: Known) -> Iterator[Given]:
    words = list(argv)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r}: settings are given as --key value; see --help")
        switch = known.get(key.removeprefix("no_"))
        if equals:
            pass
        elif switch and switch.type is bool and words[:1] not in (["true"], ["false"]):
            text, key = str(key == switch.key), switch.key
        elif words and (key in known or not words[0].startswith("--")):
            text = words.pop(0)
        elif key in known:
            raise ConfigError(f"{flag}: a value must follow")
        yield flag, key, text
