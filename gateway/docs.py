"""The description of the API: the OpenAPI document, and a page for people that needs nothing from elsewhere.

Must never load anything from another host, and never describe a call that does not exist.
"""

from typing import Any

import jinja2
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import HTMLResponse, JSONResponse, Response

from gateway.auth import CallerOf
from gateway.body import TenantRoute
from gateway.http_errors import PROBLEM_TYPE, Problem
from mesh.contract.api import EventView

_SCHEMA_PREFIX = "#/components/schemas/"
_PAGE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ info.title }}: API</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  code, pre { font: 0.9em ui-monospace, monospace; }
  summary { cursor: pointer; padding: 0.3rem 0; }
  table { border-collapse: collapse; } td { padding: 0.1rem 1rem 0.1rem 0; vertical-align: top; }
  pre { background: #8881; padding: 0.5rem; overflow: auto; }
</style>
<h1>{{ info.title }}</h1>
<p>{{ info.description }} The whole description for programs: <a href="/openapi.json">/openapi.json</a></p>
{% for path, operations in paths.items() %}
{% for method, call in operations.items() %}
<details>
  <summary><code>{{ method | upper }} {{ path }}</code> {{ call.summary }}</summary>
  <p>{{ call.description }}</p>
  <table>
  {% for parameter in call.parameters or [] %}
    <tr><td><code>{{ parameter.name }}</code></td><td>{{ parameter.in }}{% if parameter.required %}, required{% endif %}
    </td><td>{{ parameter.description or "" }}</td></tr>
  {% endfor %}
  {% for status, answer in call.responses.items() %}
    <tr><td><code>{{ status }}</code></td><td>answer</td><td>{{ answer.description }}</td></tr>
  {% endfor %}
  </table>
  {% if call.requestBody %}
  <pre>{{ call.requestBody.content["application/json"].schema | tojson }}</pre>
  {% endif %}
</details>
{% endfor %}
{% endfor %}
<h2>Shapes</h2>
{% for name, schema in components.schemas.items() %}
<details><summary><code>{{ name }}</code></summary><pre>{{ schema | tojson(indent=2) }}</pre></details>
{% endfor %}
</html>
""")


def _problem_answer(description: str) -> dict[str, Any]:
    return {"description": description, "content": {PROBLEM_TYPE: {"schema": {"$ref": f"{_SCHEMA_PREFIX}Problem"}}}}


def _complete(document: dict[str, Any]) -> dict[str, Any]:
    """Give every call the shape of its errors, name the shape of events, and drop the framework's own shape, which is never sent."""
    schemas = document["components"]["schemas"]
    for shape in (Problem, EventView):
        schema = shape.model_json_schema(ref_template=_SCHEMA_PREFIX + "{model}", mode="serialization")
        schemas.update(schema.pop("$defs", {}))
        schemas[shape.__name__] = schema
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in document["paths"].values():
        for call in operations.values():
            call["responses"].pop("422", None)
            call["responses"]["4XX"] = _problem_answer("The call is refused; `code`, `detail` and `hint` say why")
            call["responses"]["5XX"] = _problem_answer(
                "The mesh cannot serve now; `retryable` says whether to try again"
            )
    return document


def describe(app: FastAPI) -> None:
    """Let `app.openapi()` return the complete document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def add_documents(app: FastAPI) -> None:
    """Serve the document and the page."""

    async def openapi_json(_: CallerOf) -> Response:
        return JSONResponse(app.openapi())

    async def page(_: CallerOf) -> Response:
        return HTMLResponse(_PAGE.render(app.openapi()))

    documents = APIRouter(route_class=TenantRoute, include_in_schema=False)
    documents.add_api_route("/openapi.json", openapi_json, methods=["GET"], response_class=Response)
    documents.add_api_route("/docs", page, methods=["GET"], response_class=Response)
    app.include_router(documents)
