"""Tables of models beside the policy, and who may use their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forge.core.errors import ConfigError, InvalidArgument
from forge.runtime.security.tokens import Claims, Keyring
from forge.runtime.settings import load
from services.gateway.config import GatewayConfig
from services.gateway.errors import ModelNotAllowed, UnknownModel
from services.gateway.external.api import ExternalApi, with_name
from services.gateway.model_table import ModelEntry, ModelTable
from services.gateway.named_models import NamedModel, check_models

HTTPS = "https://api.invalid/v1"


def config(models: str) -> GatewayConfig:
    return load(GatewayConfig, service="gateway", argv=["--models", models], environ={})


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("a b", {"kind": "version"}, "models.a b.group = 'a b' must be at most 64 of"),
        ("judge", {"kind": "engine"}, "models.judge.model_path is missing: kind = 'engine' needs"),
        ("old", {"kind": "version", "model_path": "/m"}, "model_path = '/m' is not for kind ="),
        ("old", {"kind": "version", "url": HTTPS}, f"models.old.url = '{HTTPS}' is not for kind"),
        ("x", {"kind": "external"}, "models.x.url is missing: kind = 'external' needs it"),
        ("x", {"kind": "external", "url": HTTPS, "group": "g"}, "models.x.group = 'g' is not for"),
        ("x", {"kind": "external", "url": "ftp://h/"}, "must begin with https:// and a host"),
        ("x", {"kind": "external", "url": "https:///v1"}, "must begin with https:// and a host"),
        ("x", {"kind": "external", "url": "https://h:70000/"}, "is not a URL"),
        ("x", {"kind": "external", "url": "http://api.invalid/v1"}, "loopback interface alone"),
        ("x", {"kind": "external", "url": "http://127.0.0.1.invalid/"}, "loopback interface alone"),
        ("x", {"kind": "external", "url": HTTPS + "?key=1"}, "neither a query nor a fragment"),
        ("x", {"kind": "embeddings", "url": HTTPS, "protocol": "anthropic"}, "OpenAI's protocol"),
        ("policy", {"kind": "version"}, "name 'policy' is one of [model] too"),
        ("old", {"kind": "version", "aliases": ("policy",)}, "name 'policy' is one of [model] too"),
        ("old", {"kind": "version", "aliases": ("*",)}, "'*' is for model.aliases alone"),
        ("n" * 129, {"kind": "version", "group": "g"}, "must have 1 to 128 bytes"),
    ],
)
def test_wrong_table_is_refused_with_its_field(name: str, fields: Any, message: str) -> None:
    """Before the gateway starts."""
    with pytest.raises(InvalidArgument) as caught:
        check_models({name: NamedModel(**fields)}, ("policy",))
    assert message in str(caught.value)


def test_password_in_a_url_is_refused_and_not_repeated() -> None:
    """A log may keep the error."""
    with pytest.raises(InvalidArgument, match="the key is in key_file") as caught:
        check_models({"x": NamedModel(kind="external", url="https://me:secret@api.invalid/")}, ())
    assert "secret" not in str(caught.value)


def test_settings_are_checked_together_with_the_policys_names() -> None:
    """Two tables may not share a name either; loopback needs no TLS."""
    for url in ("http://127.0.0.1:8000/v1", "http://[::1]:8000/v1", "http://localhost/v1"):
        models = config(f'{{"x": {{"kind": "external", "url": "{url}"}}}}').models
        assert models["x"].url == url
    with pytest.raises(ConfigError, match=r"name 'b' is one of \[models.a\] too"):
        config('{"a": {"kind": "version", "aliases": ["b"]}, "b": {"kind": "version"}}')
    with pytest.raises(ConfigError, match=r"name 'policy' is one of \[model\] too"):
        config('{"policy": {"kind": "version"}}')


def test_gateways_agree_on_tables_and_not_on_paths() -> None:
    """A file may have another path on each host; the group's model has a scope of its own."""
    one, other = (
        config(f'{{"x": {{"kind": "external", "url": "{HTTPS}", "key_file": "{file}"}}}}').agreed()
        for file in ("/a", "/b")
    )
    assert one == other
    assert "gateway/models.x" in one


def turns(name: str, *, other: str = "") -> Any:
    return SimpleNamespace(model=SimpleNamespace(name=name), other=other or None)


def claims(*models: str) -> Claims:
    return Claims(subject="t:0:0", scopes=frozenset({"session"}), models=models)


def table(*policy_names: str) -> ModelTable:
    api = ExternalApi("big", NamedModel(kind="external", url=HTTPS))
    entries = [
        ModelEntry(name="old", aliases=("rival",), open=True, served=turns("m", other="old")),
        ModelEntry(name="judge", aliases=(), open=False, served=turns("j", other="judge")),
        ModelEntry(name="big", aliases=(), open=True, served=api),
    ]
    return ModelTable(turns("tiny"), (*policy_names, "tiny"), entries)


def found(models: ModelTable, who: Claims, name: str) -> str:
    served: Any = models.find(who, name)
    return served.name if isinstance(served, ExternalApi) else served.other or "policy"


def test_names_are_those_of_the_policy_and_what_the_task_allows() -> None:
    """Without names of the task the open models; else those that it names, by alias too."""
    models = table("policy")
    names = ["policy", "tiny", "old", "rival", "big"]
    served = [found(models, claims(), name) for name in names]
    assert served == ["policy", "policy", "old", "old", "big"]
    assert [name for name, _ in models.usable(claims())] == names
    assert [name for name, _ in models.usable(claims("judge"))] == ["policy", "tiny", "judge"]
    assert found(models, claims("rival"), "old") == "old"
    for who, name, words in (
        (claims(), "judge", "its task names no models"),
        (claims("judge"), "old", r"its task has models = \['judge'\]"),
        (claims("nothing"), "big", r"its task has models = \['nothing'\]"),
    ):
        with pytest.raises(ModelNotAllowed, match=words):
            models.find(who, name)
    with pytest.raises(UnknownModel, match=r"'gpt-4o' is not served here; 'tiny', 'old', .* are"):
        models.find(claims(), "gpt-4o")
    with pytest.raises(UnknownModel, match=r"'x' is not served here; 'tiny' is$"):
        ModelTable(turns("tiny"), ("policy", "tiny")).find(claims(), "x")


def test_star_is_any_name_that_no_table_has() -> None:
    """A model that the task may not call stays refused."""
    models = table("policy", "*")
    assert found(models, claims(), "gpt-4o") == "policy"
    assert found(models, claims(), "old") == "old"
    with pytest.raises(ModelNotAllowed):
        models.find(claims(), "judge")
    assert "*" not in dict(models.usable(claims()))


def test_policy_must_not_have_the_name_of_a_table() -> None:
    """Its name is known only once its directory is."""
    with pytest.raises(ConfigError, match=r"models.old: name 'old' is one of the policy too"):
        ModelTable(
            turns("old"),
            ("policy", "old"),
            [ModelEntry(name="old", aliases=(), open=True, served=turns("m", other="old"))],
        )


def test_external_api_is_refused_where_its_protocol_is_not_spoken() -> None:
    """gRPC, WebSocket, Gemini and tokens take models that are served here."""
    models = table("policy")
    assert models.turns_or_policy(claims(), "").model.name == "tiny"
    with pytest.raises(UnknownModel, match="'' is not served here"):
        models.turns(claims(), "")
    assert models.turns(claims(), "old").other == "old"  # type: ignore[comparison-overlap]
    with pytest.raises(InvalidArgument, match="'big' is an external API of kind external"):
        models.turns(claims(), "big")


def test_names_of_models_are_signed_into_the_token() -> None:
    """The gateway trusts the token alone."""
    ring = Keyring.from_bytes(b"k" * 32)
    token = ring.sign(claims("judge", "old"))
    assert ring.verify(token, now_s=0.0).models == ("judge", "old")
    assert ring.verify(ring.sign(claims()), now_s=0.0).models == ()


def test_body_is_forwarded_with_another_name_and_as_it_is_otherwise() -> None:
    """Numbers keep their spelling; of two names none stays."""
    body = b'{"model": "big", "seed": 12345678901234567890123, "x": 1.50, "model": "old"}'
    assert with_name(body, "big-1") == (
        b'{"model":"big-1","seed":12345678901234567890123,"x":1.50}'
    )
