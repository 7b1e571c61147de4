"""`Section`: a group of options that is checked as a whole, and says what is wrong in one line each."""

from __future__ import annotations

import difflib
import os
from collections.abc import Container, Iterable, Mapping
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer
from pydantic.fields import FieldInfo

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Problem(NamedTuple):
    """What is wrong with one option: its name, empty where it is none's own, and the text behind it."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.name else self.text


class ConfigError(ValueError):
    """A configuration that cannot be used; one line for each option: its name, what was found, what is expected.

    Attributes:
        problems: the lines in their parts, where they are of options.
    """

    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> ConfigError:
        """The error that tells all of them."""
        told = tuple(problems)
        error = cls("\n".join(map(str, told)))
        error.problems = told
        return error


def option(
    default: Any, description: str, *, when: Mapping[str, tuple[Any, ...]] | None = None, expected: str = "", **limits: Any
) -> Any:
    """A field of a `Section`.

    Args:
        default: its value where none is given.
        description: what help says.
        when: other options of the section, each with the values beside which this one has an effect; else it cannot be given.
        expected: what messages say is expected, where types and limits do not say it.
        **limits: as of `pydantic.Field`: `ge, gt, le, lt, pattern, min_length`.
    """
    return Field(default, description=description, json_schema_extra={"when": dict(when or {}), "expected": expected}, **limits)  # type: ignore[arg-type]


class Section(BaseModel):
    """A group of options.

    Types are strict: `1` is no boolean and `"64"` no number, in Python as in a file. Where an option may be None, a file (TOML
    knows no null) says `"none"`. An option that has no effect beside the others cannot be given, and is not written down.

    Raises:
        ConfigError: one line per wrong option: its name, what was found, what is expected.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False, defer_build=True
    )

    def __init__(self, **values: Any) -> None:
        kind, problems = type(self), []
        plain = {name: _plain(kind, name, value) for name, value in values.items()}
        for name in plain:
            if name not in kind.model_fields:
                problems.append(Problem(name, unknown(name, kind.model_fields)))
            elif without_effect := inert(kind, name, plain):
                problems.append(Problem(name, without_effect))
        given = {name: value for name, value in plain.items() if name in kind.model_fields}
        try:
            super().__init__(**given)
        except ValidationError as error:
            found = {str(problem["loc"][0]) if problem["loc"] else "": problem for problem in error.errors(include_url=False)}
            problems = certain(kind, problems, found)
            for name, problem in found.items():
                if name:
                    text = f"got {short(given.get(name))}, expected {expected(kind.model_fields[name])}"
                else:
                    text = problem["msg"].removeprefix("Value error, ")
                problems.append(Problem(name, text))
        else:
            problems += [] if problems else self.contradictions()
        if problems:
            raise ConfigError.of(problems)

    def contradictions(self) -> Iterable[Problem]:
        """What is wrong with values that are right one by one; a section with such rules overrides it."""
        return ()

    @model_serializer(mode="wrap")
    def _with_effect(self, serialize: Any) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        # As JSON and TOML have them.
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {name: value for name, value in values.items() if not inert(type(self), name, values)}


def _plain(kind: type[Section], name: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    field = kind.model_fields.get(name)
    if field is not None and takes_several(field):
        return (value,) if isinstance(value, (str, int)) and not isinstance(value, bool) else _as_tuple(value)
    return None if value == "none" and field is not None and NoneType in kinds(field) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def takes_several(field: FieldInfo) -> bool:
    """Whether a field takes several values of its type; one alone stands for itself."""
    return get_origin(field.annotation) is tuple


def inert(kind: type[Section], name: str, values: Mapping[str, Any], prefix: str = "") -> str:
    """Why the option `name` has no effect beside the other `values`; empty where it has one. `prefix` is put before names."""
    for other, allowed in _extra(kind.model_fields[name]).get("when", {}).items():
        value = values.get(other, kind.model_fields[other].default)
        value = None if value == "none" else value
        if value not in allowed:
            return f"belongs to {prefix}{other} {or_list(allowed)}, got {spelt(value)}"
    return ""


def certain(kind: type[Section], problems: Iterable[Problem], wrong: Container[str], prefix: str = "") -> list[Problem]:
    """The problems but for options whose effect depends on a `wrong` one: nobody knows whether they would have had one."""

    def depends(name: str) -> bool:
        field = kind.model_fields.get(name.removeprefix(prefix))
        return field is not None and any(other in wrong for other in _extra(field).get("when", {}))

    return [of for of in problems if not depends(of.name)]


def kinds(field: FieldInfo) -> set[type]:
    """The Python types that a field takes."""
    annotation = field.annotation
    if isinstance(annotation, type):
        return {annotation}
    parts = [inner for part in get_args(annotation) for inner in (get_args(part) if get_origin(part) is Literal else (part,))]
    return {part if isinstance(part, type) else type(part) for part in parts if part is not Ellipsis}


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The values that a field can take, where they are a fixed few, as flags write them; else nothing."""
    if get_origin(field.annotation) is Literal:
        return get_args(field.annotation)
    found: list[str] = []
    is_few = False
    for part in get_args(field.annotation):
        is_few |= get_origin(part) is Literal
        found += get_args(part) if get_origin(part) is Literal else ["none"] if part is NoneType else []
    return tuple(found) if is_few else ()


def effect(field: FieldInfo) -> str:
    """With which other options a field has an effect, in words; empty where always."""
    return "; ".join(f"{other} {or_list(allowed)}" for other, allowed in _extra(field).get("when", {}).items())


def expected(field: FieldInfo) -> str:
    """What a field takes, in words."""
    found = kinds(field)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    text = _extra(field).get("expected") or or_list(choices(field))
    if not text:
        text = next((said for kind, said in words.items() if kind in found), "a value of another type")
        text += " or several" if takes_several(field) else ""
        limits = [
            f"{said} {_number(getattr(limit, name))}"
            for name, said in _BOUNDS.items()
            for limit in field.metadata
            if hasattr(limit, name)
        ]
        text += f", {' and '.join(limits)}" if limits else ""
    return text + (", or none" if NoneType in found and not choices(field) else "")


def _number(value: float) -> str:
    return f"2^{int(value).bit_length() - 1}" if value >= 2**31 else f"{value:g}" if isinstance(value, float) else f"{value}"


def unknown(name: str, known: Iterable[str]) -> str:
    """What to say of an option that there is none of."""
    names = list(known)
    close = difflib.get_close_matches(str(name).replace("-", "_").lower(), names, n=1)
    return "unknown option; " + (f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}")


def or_list(values: Iterable[Any]) -> str:
    """`a, b or c`."""
    *most, last = [spelt(value) for value in values] or [""]
    return f"{', '.join(most)} or {last}" if most else last


def spelt(value: Any) -> str:
    """A value as files and flags write it."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(spelt, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def short(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
