"""The OpenAPI document: each route of the server, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jsonschema

from services.gateway.config import ConnectionSettings
from services.gateway.http.openapi import BODIES, document
from services.gateway.http.server import HttpServer

EDGE: Any = SimpleNamespace(turns=None, sessions=None)
ROUTES = list(
    HttpServer(EDGE, max_body_bytes=1, connections=ConnectionSettings())
    ._application(1)
    .router.routes()
)


def test_openapi_document_has_exactly_the_routes() -> None:
    """Also the body of each POST."""
    paths = document(ROUTES)["paths"]
    routes = {(r.resource.canonical, r.method) for r in ROUTES if r.resource and r.method != "HEAD"}
    described = {(path, method.upper()) for path in paths for method in paths[path]}
    assert described == routes
    posts = {path for path, method in routes if method == "POST"}
    assert posts == {path for path in paths if "requestBody" in paths[path].get("post", {})}
    assert set(BODIES) == {path.removeprefix("/s/{token}") for path in posts}


def test_bodies_have_schemas_with_their_messages() -> None:
    """Each schema is a JSON schema and describes the fields that are decoded later."""
    whole = document(ROUTES)
    schemas = whole["components"]["schemas"]
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object", name
    body = {"$ref": "#/components/schemas/ChatCompletionRequest"}
    validator = jsonschema.Draft202012Validator(body | {"components": whole["components"]})
    assert validator.is_valid({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert not validator.is_valid({"model": "m", "messages": [{"content": "hi"}]})
