"""The routes' description in OpenAPI 3.1, made from the routes and from the types that read requests."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

import conserve
from conserve.batch_api.bodies import ID, WINDOW, CreateBatch
from conserve.endpoints.protocol import Url

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
MAYBE_TEXT, MAYBE_WHOLE = {"type": ["string", "null"]}, {"type": ["integer", "null"]}
STAMPS = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def object_of(**properties: Any) -> dict[str, Any]:
    """Schema of an object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(name: str) -> dict[str, Any]:
    """Schema of a page."""
    items = {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}
    ends = {"first_id": MAYBE_TEXT, "last_id": MAYBE_TEXT, "has_more": {"type": "boolean"}}
    return object_of(object={"const": "list"}, data=items, **ends)


SCHEMAS: dict[str, Any] = {
    "File": object_of(
        id=TEXT,
        object={"const": "file"},
        bytes=WHOLE,
        created_at=WHOLE,
        expires_at=MAYBE_WHOLE,
        filename=TEXT,
        purpose={"enum": ["batch", "batch_output"]},
        status=TEXT,
    ),
    "Deleted": object_of(id=TEXT, object={"const": "file"}, deleted={"const": True}),
    "Batch": object_of(
        id=TEXT,
        object={"const": "batch"},
        endpoint=TEXT,
        errors={"type": ["object", "null"]},
        input_file_id=TEXT,
        completion_window=TEXT,
        status=TEXT,
        output_file_id=MAYBE_TEXT,
        error_file_id=MAYBE_TEXT,
        created_at=WHOLE,
        request_counts=object_of(total=WHOLE, completed=WHOLE, failed=WHOLE),
        metadata={"type": ["object", "null"]},
        **{f"{name}_at": MAYBE_WHOLE for name in STAMPS},
    ),
    "Files": list_of("File"),
    "Batches": list_of("Batch"),
    "Error": object_of(error=object_of(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=MAYBE_TEXT)),
}
NARROWER = {  # than their types, and checked by `bodies.create_batch`
    "endpoint": {"enum": [url.value for url in Url]},
    "input_file_id": {"type": "string", "pattern": f"^{ID.pattern}$"},
    "completion_window": {"type": "string", "pattern": f"^{WINDOW.pattern}$"},
}
EVENTS, STREAM = "Events", "/v1/batches/{id}/events"
ANSWERS = {
    ("POST", "/v1/files"): "File",
    ("GET", "/v1/files"): "Files",
    ("GET", "/v1/files/{id}"): "File",
    ("DELETE", "/v1/files/{id}"): "Deleted",
    ("POST", "/v1/batches"): "Batch",
    ("GET", "/v1/batches"): "Batches",
    ("GET", "/v1/batches/{id}"): "Batch",
    ("POST", "/v1/batches/{id}/cancel"): "Batch",
    ("GET", STREAM): EVENTS,
}
LINKS: dict[tuple[str, str], list[tuple[str, str]]] = {
    made: [each for each in ANSWERS if each[1].startswith(f"{made[1]}/{{id}}") and each[1] != STREAM]
    for made in (("POST", "/v1/files"), ("POST", "/v1/batches"))
}
"""Operations on what an operation has made, for tools that try them in turn; a stream would not end."""
FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
}
PAGES: dict[str, dict[str, Any]] = {
    "/v1/files": {"limit": WHOLE, "after": TEXT, "purpose": TEXT, "order": {"enum": ["asc", "desc"]}},
    "/v1/batches": {"limit": WHOLE, "after": TEXT},
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The description of these routes."""
    _, asked = msgspec.json.schema_components([CreateBatch], ref_template="#/components/schemas/{name}")
    asked[CreateBatch.__name__]["properties"] |= NARROWER
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = operation(route, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ConServe's Batch API", "version": conserve.__version__},
        "paths": paths,
        "components": {"schemas": {**asked, **SCHEMAS}},
    }


def operation(route: Route, method: str) -> dict[str, Any]:
    """One method of a route."""
    answer = ANSWERS.get((method, route.path))
    found: dict[str, Any] = {
        "operationId": name((method, route.path)),
        "summary": inspect.getdoc(route.endpoint),
        "parameters": parameters(route, method),
        "responses": {"200": answered(answer), "4XX": answered("Error"), "503": answered("Error")},
    }
    if (method, route.path) in LINKS:
        found["responses"]["200"]["links"] = links(method, route.path)
    if answer == EVENTS:
        found["responses"]["204"] = {"description": "The batch has ended, and the client has its last event"}
    if method == "POST" and not route.param_convertors:
        kind, schema = ("multipart/form-data", FORM)
        if route.path == "/v1/batches":
            kind, schema = "application/json", {"$ref": "#/components/schemas/CreateBatch"}
        found["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    return found


def name(operation: tuple[str, str]) -> str:
    """Name of a method of a route: "POST /v1/batches/{id}/cancel" is post_batches_id_cancel."""
    method, path = operation
    return "_".join([method.lower(), *re.findall(r"[a-z]+", path.removeprefix("/v1/"))])


def links(method: str, path: str) -> dict[str, Any]:
    """Links from an answer to operations on what it shows; an upload may also be the input of a batch."""
    made = "$response.body#/id"
    found: dict[str, Any] = {
        name(to): {"operationId": name(to), "parameters": {"id": made}} for to in LINKS[method, path]
    }
    if path == "/v1/files":
        batch = name(("POST", "/v1/batches"))
        found[batch] = {"operationId": batch, "requestBody": {"input_file_id": made}}
    return found


def parameters(route: Route, method: str) -> list[dict[str, Any]]:
    """Parameters of a path and of a query."""
    path = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in route.param_convertors]
    query = PAGES.get(route.path, {}) if method == "GET" else {}
    last = (
        [{"name": "Last-Event-ID", "in": "header", "schema": TEXT}]
        if ANSWERS.get((method, route.path)) == EVENTS
        else []
    )
    return [
        *path,
        *last,
        *({"name": name, "in": "query", "schema": schema} for name, schema in query.items()),
    ]


def answered(name: str | None) -> dict[str, Any]:
    """An answer of this schema; bytes without one."""
    if name == EVENTS:
        return {
            "description": "Events, each with a Batch",
            "content": {"text/event-stream": {"schema": TEXT}},
        }
    if name is None:
        return {"description": "The contents of the file", "content": {"application/octet-stream": {}}}
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": name, "content": {"application/json": {"schema": schema}}}
