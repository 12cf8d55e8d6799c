"""The reference of every section and key as Markdown, from the schema that checks the files. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_rl.config.validation import Schema, phrase
from titan_rl.config.writer import inline


def make_reference(schema: Schema) -> str:
    """Return one Markdown section per TOML section, with a table of its keys.

    Args:
        schema: From :func:`titan_rl.config.schema.make_schema`.

    >>> steps = {"type": "integer", "minimum": 1, "default": 5, "description": "Optimiser steps."}
    >>> training = {"type": "object", "properties": {"steps": steps}}
    >>> print(make_reference({"properties": {"training": training}}), end="")
    ## `[training]`
    <BLANKLINE>
    | key | value | default | meaning |
    |---|---|---|---|
    | `steps` | an integer >= 1 | `5` | Optimiser steps. |
    """
    return "\n".join(_section(schema, name="", title="")).rstrip("\n") + "\n"


def _section(schema: Schema, *, name: str, title: str) -> Iterator[str]:
    """Yield the lines of a section: its title and text, the table of its keys, then its sub-sections."""
    shown = {key: inner for key, inner in schema["properties"].items() if "not" not in inner}
    sections = {key: part for key, inner in shown.items() if (part := _section_in(inner)) is not None}
    keys = {key: inner for key, inner in shown.items() if key not in sections and key != "type"}
    if title and (keys or "description" in schema):
        yield from (f"## {title}", "")
    if "description" in schema:
        yield from (_text(schema["description"]), "")
    if keys:
        yield from ("| key | value | default | meaning |", "|---|---|---|---|")
        required = schema.get("required", ())
        for key, inner in keys.items():
            yield _row(key, inner, otherwise="required" if key in required else "")
        yield ""
    for key, part in sections.items():
        yield from _subsection(shown[key], part, name=f"{name}.{key}" if name else key)


def _subsection(outer: Schema, part: Schema, *, name: str) -> Iterator[str]:
    is_array = part.get("type") == "array"
    inner = part["items"] if is_array else part
    title = f"`[[{name}]]`" if is_array else f"`[{name}]`"
    is_off = outer.get("default") == "none"
    said = [
        outer.get("description", inner.get("description", "")),
        "Off unless it is there." if is_off else "",
    ]
    about = {"description": " ".join(filter(None, said))} if any(said) else {}
    if "oneOf" not in inner:
        yield from _section(inner | about, name=name, title=title)
        return
    yield from (f"## {title}", "")
    if about:
        yield from (_text(about["description"]), "")
    branches = {
        inline(kind["const"]): branch
        for branch in inner["oneOf"]
        if "const" in (kind := branch["properties"]["type"])
    }
    default = [f" The default is `{n}`." for n, b in branches.items() if "default" in b["properties"]["type"]]
    names = ", ".join(f"`{name}`" for name in branches)
    yield from (f'`type` is one of {names}, or `"package.module:Class"`.{"".join(default)}', "")
    for chosen, branch in branches.items():
        yield from _section(branch, name=name, title=f"{title} with `type = {chosen}`")


def _section_in(schema: Schema) -> Schema | None:
    """Return the section, choice or array of sections that a property holds, or None for a single value."""
    for option in schema.get("anyOf", [schema]):
        inner = option.get("items", option)
        if isinstance(inner, dict) and ("properties" in inner or "oneOf" in inner):
            return option
    return None


def _row(key: str, schema: Schema, *, otherwise: str) -> str:
    value = phrase(schema)
    default = f"`{_cell(inline(schema['default']))}`" if "default" in schema else otherwise
    return f"| `{key}` | {_cell(value)} | {default} | {_cell(_text(schema.get('description', '')))} |"


def _text(description: str) -> str:
    return " ".join(description.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
