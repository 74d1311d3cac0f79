"""Faults of JSON schemas: those that no engine reads, and those that would take too long to be checked.

A client's row brings its schema. What the check of one row takes in memory and time is bounded here.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec

from conserve.errors import one_line
from conserve.jobs.inputs.nesting import is_deeper
from conserve.jobs.requests.wording import shown

MAX_SCHEMA_DEPTH = 64  # objects and lists, as vLLM has it
MOST_BYTES = 256 << 10  # of a schema as JSON; a wrong item in one of two takes jsonschema some 2 KB
MOST_ITEMS = 500  # of a list whose items jsonschema compares each with each
MOST_SAID = 300  # characters of what jsonschema says, which repeats a part of the schema
KEPT = 16  # schemas whose check is remembered, each of up to `MOST_BYTES`
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
IDS = ("$id", "id")  # a part that has one is the root of the pointers in it; drafts 3 and 4 write id
VALUES = ("const", "default", "enum", "examples")  # keywords of a JSON schema that hold no schemas


def schema_fault(schema: object) -> str | None:
    """Fault of a JSON schema; None without one."""
    if not isinstance(schema, dict):
        return f"a JSON schema is an object, not {shown(schema)}"
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        return f"the JSON schema nests more than {MAX_SCHEMA_DEPTH} levels deep"
    encoded = msgspec.json.encode(schema)
    if (fault := size_fault(len(encoded)) or list_fault(schema)) is not None:
        return fault
    if (remote := remote_reference(schema)) is not None:
        return f"the JSON schema refers to {shown(remote)}, which no engine fetches; put it under $defs"
    if (lost := lost_reference(schema)) is not None:
        return f"the JSON schema refers to {shown(lost)}, which it does not have; correct the reference"
    return meta_schema_fault(encoded)


def size_fault(num_bytes: int) -> str | None:
    """Fault of a JSON schema that is too long to be checked; None if it is not."""
    if num_bytes <= MOST_BYTES:
        return None
    return f"the JSON schema has {num_bytes:,} bytes, and at most {MOST_BYTES:,} are taken; shorten it"


def list_fault(schema: object) -> str | None:
    """Fault of a list whose items jsonschema would compare each with each; None without one.

    It sorts text or numbers instead. Lists are looked for under any name: a property may be called as a keyword is.
    """
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list) and len(part) > MOST_ITEMS and not is_sortable(part):
            return (
                f"the JSON schema has a list of {len(part):,} items that are neither all text nor all numbers, "
                f"and at most {MOST_ITEMS:,} are taken; shorten it"
            )
        inner = part.values() if isinstance(part, dict) else part
        waiting += [one for one in inner if isinstance(one, dict | list)]
    return None


def is_sortable(items: list[Any]) -> bool:
    """True if all items of a list are text, or all are numbers."""
    kinds = set(map(type, items))
    return kinds <= {str} or kinds <= {int, float}


def remote_reference(schema: object) -> str | None:
    """First reference of a JSON schema that points out of it; None without one."""
    targets = (one[name] for one in objects_of(schema) for name in REFERENCES if name in one)
    return next(
        (target for target in targets if isinstance(target, str) and not target.startswith("#")), None
    )


def lost_reference(schema: dict[str, Any]) -> str | None:
    """First JSON pointer of a schema's `$ref` that leads nowhere; None without one, or where parts have ids."""
    parts = list(objects_of(schema))
    if any(isinstance(one.get(name), str) for one in parts[1:] for name in IDS):
        return None
    targets = [target for one in parts if isinstance(target := one.get("$ref"), str)]
    return next((one for one in targets if one.startswith("#/") and not leads_somewhere(one, schema)), None)


def leads_somewhere(pointer: str, schema: object) -> bool:
    """True if a JSON pointer behind # names a part of the schema."""
    for step in unquote(pointer.removeprefix("#/")).split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and key in schema:
            schema = schema[key]
        elif isinstance(schema, list) and key.isascii() and key.isdigit() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return False
    return True


def objects_of(schema: object) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON schema that may be schemas, the outermost first."""
    if isinstance(schema, list):
        for one in schema:
            yield from objects_of(one)
    elif isinstance(schema, dict):
        yield schema
        yield from objects_of([part for name, part in schema.items() if name not in VALUES])


@lru_cache(maxsize=KEPT)
def meta_schema_fault(schema: bytes) -> str | None:
    """Fault of a JSON schema by its draft's meta-schema. Cached, since a file's lines mostly share one schema."""
    from jsonschema.exceptions import SchemaError, best_match
    from jsonschema.validators import Draft202012Validator, validator_for

    document = msgspec.json.decode(schema)
    if not isinstance(document.get("$schema", ""), str):
        return "this is no JSON schema ($schema names a draft by its address)"
    kind = validator_for(document, default=Draft202012Validator)
    found: SchemaError | None = best_match(kind(kind.META_SCHEMA).iter_errors(document))
    if found is None:
        return None
    where = f"{found.json_path}: " if found.json_path != "$" else ""
    return f"this is no JSON schema ({one_line(where + found.message, most=MOST_SAID)})"
