"""Where settings come from, and what a wrong one says."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from forge.core.errors import ConfigError, InvalidArgument
from forge.runtime.settings import ServiceConfig, load, to_toml


class Color(enum.Enum):
    WHITE = "white"
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class LightSettings:
    """The light in an oven."""

    color: Color = Color.WHITE
    """Color of the lamp."""
    power_w: Annotated[float, Meta(ge=0)] = 15.0
    """Power of the lamp."""
    door: bool = True
    """Whether the door switches it."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Time that it is on, by recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OvenConfig(ServiceConfig):
    """Bakes."""

    heat_c: Annotated[float, Meta(ge=30, le=300)] = 180.0
    """Temperature of
    the air."""
    trays: Annotated[int, Meta(ge=1)] = 2
    """Trays that fit."""
    mode: Literal["top", "bottom"] = "top"
    """Where the heat comes from."""
    light: LightSettings = field(default_factory=LightSettings)
    fan: bool = False
    """Whether the fan turns."""
    recipes: tuple[str, ...] = ()
    """Names of what it can bake."""
    shares: Mapping[str, Annotated[float, Meta(gt=0)]] = field(
        default_factory=lambda: {"bread": 1.0}
    )
    """How the space is divided."""
    label: str = ""
    """Text on the door."""

    def validate(self) -> None:
        if self.mode == "bottom" and self.heat_c > 250:
            raise InvalidArgument(f"heat_c = {self.heat_c} is not allowed with mode = bottom")


def oven(
    *argv: str, environ: Mapping[str, str] | None = None, toml: Path | None = None
) -> OvenConfig:
    words = [*argv, *(("--config", str(toml)) if toml else ())]
    return load(OvenConfig, service="oven", argv=words, environ=environ or {})


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "oven.toml"


def test_defaults_hold_without_any_source() -> None:
    """Without file, variables and flags."""
    assert oven() == OvenConfig()


def test_flag_overrides_service_variable_overrides_variable_overrides_file(toml: Path) -> None:
    """The nearer to the process a source is, the stronger it is."""
    toml.write_text('trays = 3\nhost = "127.0.0.2"\nlabel = "file"\nmode = "bottom"\n')
    environ = {"FORGE_HOST": "127.0.0.3", "FORGE_TRAYS": "4", "FORGE_OVEN_TRAYS": "5"}
    environ["FORGE_LABEL"] = "env"
    config = oven("--label", "flag", environ=environ, toml=toml)
    assert (config.mode, config.host, config.trays, config.label) == (
        "bottom",
        "127.0.0.3",
        5,
        "flag",
    )


def test_environment_may_name_the_config_file(toml: Path) -> None:
    """FORGE_CONFIG is set by systemd units."""
    toml.write_text("trays = 7\n")
    assert oven(environ={"FORGE_CONFIG": str(toml)}).trays == 7


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--heat-c", "200"], "heat_c", 200.0),
        (["--heat-c=200.5"], "heat_c", 200.5),
        (["--trays=4"], "trays", 4),
        (["--fan"], "fan", True),
        (["--fan", "false"], "fan", False),
        (["--fan=yes"], "fan", True),
        (["--no-fan"], "fan", False),
        (["--recipes", "bread, cake"], "recipes", ("bread", "cake")),
        (["--shares", "a=0.25,b=0.75"], "shares", {"a": 0.25, "b": 0.75}),
        (["--label", "--not-a-flag"], "label", "--not-a-flag"),
        (["--label="], "label", ""),
        (["--light.color", "red"], "light", LightSettings(color=Color.RED)),
        (["--light.power-w=20"], "light", LightSettings(power_w=20.0)),
        (["--no-light.door"], "light", LightSettings(door=False)),
        (["--light.times=cake=2.5"], "light", LightSettings(times={"cake": 2.5})),
    ],
)
def test_flags_accept_every_type_in_both_spellings(
    words: list[str], field: str, value: Any
) -> None:
    """`--key value` and `--key=value`, and --key / --no-key for a switch."""
    assert getattr(oven(*words), field) == value


def test_table_gets_its_settings_from_every_source(toml: Path) -> None:
    """A dot in a flag and two underscores in a variable follow the name of the table."""
    toml.write_text('[light]\ncolor = "red"\npower_w = 1\ndoor = false\n[light.times]\ncake = 1\n')
    environ = {"FORGE_LIGHT__DOOR": "true", "FORGE_OVEN_LIGHT__POWER_W": "2"}
    config = oven("--light.power-w=3", environ=environ, toml=toml)
    assert config.light == LightSettings(color=Color.RED, power_w=3.0, times={"cake": 1.0})
    assert oven(environ=environ).light.power_w == 2.0


@pytest.mark.parametrize(
    ("flag", "key", "variable"),
    [
        ("--power-w", "power_w", "FORGE_POWER_W"),
        ("--light-power-w", "light_power_w", "FORGE_OVEN_LIGHT_POWER_W"),
    ],
)
def test_key_without_its_table_names_the_table(
    toml: Path, flag: str, key: str, variable: str
) -> None:
    """A key of a table that was once flat is refused by each source, with its place."""
    toml.write_text(f"{key} = 3\n")
    for argv, environ, file in (
        ((flag, "3"), {}, None),
        ((), {variable: "3"}, None),
        ((), {}, toml),
    ):
        with pytest.raises(
            ConfigError, match=f"no setting {key}.*did you mean light.power_w "
        ) as e:
            oven(*argv, environ=environ, toml=file)
        assert "\n" not in str(e.value)


def test_settings_are_checked_together() -> None:
    """The service's own check runs while settings are read, from every source."""
    with pytest.raises(ConfigError, match=r"^heat_c = 300\.0 is not .* mode = bottom$"):
        oven("--heat-c=300", environ={"FORGE_MODE": "bottom"})


def test_toml_file_may_begin_with_a_byte_order_mark(toml: Path) -> None:
    """As editors of other systems write it, with their ends of lines."""
    toml.write_bytes(b"\xef\xbb\xbfheat_c = 200\r\nfan = true\r\n")
    config = oven(toml=toml)
    assert (config.heat_c, config.fan) == (200.0, True)


def test_toml_file_accepts_every_type(toml: Path) -> None:
    """In TOML's own types."""
    toml.write_text(
        'heat_c = 200\nfan = true\nrecipes = ["bread"]\nmode = "bottom"\n[shares]\na = 1\n'
    )
    config = oven(toml=toml)
    assert (config.heat_c, config.fan, config.recipes) == (200.0, True, ("bread",))
    assert config.shares == {"a": 1.0}
    assert isinstance(config.heat_c, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heat_c = 500", "heat_c = 500 is not allowed: a number from 30 to 300"),
        ("heat_c = nan", "heat_c = nan is not allowed: a number from 30 to 300"),
        ('heat_c = "hot"', "heat_c = 'hot' is not allowed: a number from 30 to 300"),
        ("trays = 0", "trays = 0 is not allowed: a whole number of at least 1"),
        ("trays = 1.5", "trays = 1.5 is not allowed: a whole number of at least 1"),
        ("trays = true", "trays = True is not allowed: a whole number of at least 1"),
        (
            "light = 1",
            "there is no setting light = 1; did you mean light.color (one of white, red)",
        ),
        ("[light]\npower_w = -1", "light.power_w = -1 is not allowed: a number of at least 0"),
        (
            "[light]\npower = 1",
            "there is no setting light.power = 1; did you mean light.power_w (a",
        ),
        ('mode = "left"', "mode = 'left' is not allowed: one of top, bottom"),
        ("fan = 1", "fan = 1 is not allowed: true or false"),
        (
            "[shares]\na = 0",
            "shares = {'a': 0} is not allowed: a table (a=1,b=2), each a number above 0",
        ),
        ("heatc = 4", "there is no setting heatc = 4; did you mean heat_c (a number from 30"),
        ("hc = 4", "there is no setting hc = 4; did you mean heat_c (a number from 30"),
        ("[light]\npw = 1", "there is no setting light.pw = 1; did you mean light.power_w (a"),
        ("xyzzy = 4", "there is no setting xyzzy = 4; see --help"),
        ("heat_c = ", "cannot be read: Invalid value (at end of document)"),
    ],
)
def test_wrong_file_is_one_line_with_file_key_value_and_allowed_values(
    toml: Path, text: str, message: str
) -> None:
    """The line is enough to fix the file."""
    toml.write_text(text)
    with pytest.raises(ConfigError) as caught:
        oven(toml=toml)
    assert str(caught.value).startswith(f"{toml}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["--trays", "none"], {}, "--trays: trays = 'none' is not allowed"),
        (["--tray", "3"], {}, "--tray: there is no setting tray = '3'; did you mean trays"),
        (["--trays"], {}, "--trays: a value must follow"),
        (
            ["--no-fan", "true"],
            {},
            "--no-fan: there is no setting no_fan = 'true'; did you mean fan",
        ),
        (["trays=3"], {}, "settings are given as --key value"),
        ([], {"FORGE_TRAYS": "x"}, "FORGE_TRAYS: trays = 'x' is not allowed"),
        ([], {"FORGE_OVEN_TRAY": "3"}, "FORGE_OVEN_TRAY: there is no setting tray = '3'"),
        (["--config", "/no/such.toml"], {}, "/no/such.toml: cannot be read: No such file"),
    ],
)
def test_error_names_the_wrong_flag_or_variable(
    words: list[str], environ: dict[str, str], message: str
) -> None:
    """The source of a wrong value is part of the error."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        oven(*words, environ=environ)


def test_variable_of_another_service_is_ignored() -> None:
    """One environment may have the settings of several services."""
    assert oven(environ={"FORGE_GRPC_ADDR": "h:1", "FORGE_STOVE_TRAYS": "9"}) == OvenConfig()


def test_help_names_every_setting_with_default_range_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--help alone is enough to write a config file."""
    with pytest.raises(SystemExit) as caught:
        oven("--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    shared, _, own = text.partition("\n# Settings of this service:\n")
    own, _, table = own.partition("\n[light]\n# The light in an oven.\n")
    assert "# Temperature of the air. (a number from 30 to 300)\nheat_c = 180.0\n" in own
    assert '# Color of the lamp. (one of white, red)\ncolor = "white"\n' in table
    assert "lease_ttl_s = " in shared.partition("\n# Settings of every service:\n")[2]
    assert "FORGE_OVEN_<KEY>" in shared
    assert shared.startswith("usage: python -m ")


def test_printed_config_is_read_back(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config shows the current settings, as a file to start from."""
    with pytest.raises(SystemExit) as caught:
        oven("--heat-c", "99", "--print-config", "--shares", "a=0.5", "--light.color=red")
    assert caught.value.code == 0
    toml.write_text(capsys.readouterr().out)
    assert oven(toml=toml) == OvenConfig(
        heat_c=99.0, shares={"a": 0.5}, light=LightSettings(color=Color.RED)
    )


@given(
    config=st.builds(
        OvenConfig,
        heat_c=st.floats(30, 300),
        trays=st.integers(1, 10**12),
        fan=st.booleans(),
        recipes=st.lists(st.text(min_size=1)).map(tuple),
        shares=st.dictionaries(st.text(min_size=1), st.floats(1e-9, 1)),
        light=st.builds(
            LightSettings,
            color=st.sampled_from(Color),
            power_w=st.floats(0),
            times=st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False)),
        ),
        label=st.text(),
    )
)
def test_every_config_survives_its_toml(
    config: OvenConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any text in a setting."""
    toml = tmp_path_factory.mktemp("toml") / "oven.toml"
    toml.write_text(to_toml(config), encoding="utf-8")
    assert oven(toml=toml) == config
