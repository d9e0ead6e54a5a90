"""A section is a model with a field for each key, and has tables of the keys of DeepSpeed that are no fields.

Nothing here knows a key by name: the models (`offload.config.section` and those it is made of) say which keys there
are, which of DeepSpeed's are accepted without effect and which are refused; `offload.config.reader` says so to users.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ..units import KiB, format_bytes, parse_bytes


def _no_switch(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


Factor = Annotated[float, Field(ge=0), BeforeValidator(_no_switch)]


def _whole(value: object) -> object:
    """Take 1e9, which is how DeepSpeed's files write element counts, for the whole number it is."""
    value = _no_switch(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
NumElements = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
ByteCount = Annotated[int, BeforeValidator(parse_bytes)]


_LEAST_BUDGET = 4 * KiB
DeviceBudget = Annotated[int, Field(ge=_LEAST_BUDGET), BeforeValidator(parse_bytes)]


def _budget(value: Any) -> int | str:
    if value == "auto":
        return "auto"
    budget = parse_bytes(value)
    if budget < _LEAST_BUDGET:
        raise ValueError(f"is less than {format_bytes(_LEAST_BUDGET)}")
    return budget


_BUDGET_SCHEMA = {"type": ["integer", "string"], "minimum": _LEAST_BUDGET}
ByteBudget = Annotated[int | Literal["auto"], PlainValidator(_budget), WithJsonSchema(_BUDGET_SCHEMA)]


def key(
    default: object, write: str, deepspeed: str = "", unit: str = "", *, shown: str | None = None, **limits: Any
) -> Any:
    """Make a field of a section: default, what may be written, equivalent in DeepSpeed (and default there), unit.

    `shown` is what people read as its default, where `default` itself says nothing.
    """
    if shown is None:
        shown = "none" if default in (None, ()) else json.dumps(default)
    extra: dict[str, Any] = {"x-write": write, "x-deepspeed": deepspeed, "x-unit": unit, "x-default": shown}
    if unit == "bytes" and isinstance(default, int):
        extra |= {"type": ["integer", "string"], "x-default": format_bytes(default)}
    return Field(default=default, json_schema_extra=extra, **limits)


def each(keys: str, why: Any) -> dict[str, Any]:
    """Make a table of several keys, separated by spaces, that have one entry in common."""
    return dict.fromkeys(keys.split(), why)


READER: Mapping[str, object] = {"reader": True}
"""Context of validation that leaves contradictions to the reader, which tells those of all sections at once."""


class Contradiction(NamedTuple):
    """Keys that do not go together, each relative to the section that says so.

    The one to change comes first. `what` says why, with the others and their values, and what to write.
    """

    key: str
    what: str
    beside: tuple[str, ...]


def _accept_more(schema: dict[str, Any], model: type["Section"]) -> None:
    """Let the JSON schema accept what the reader accepts: "auto", other spellings and keys without meaning."""
    keys = schema.setdefault("properties", {})
    for name, field in model.model_fields.items():
        if section_of(field) is None and not takes_auto(field.annotation):
            keys[name] = _or_auto(keys[name])
    for spelling, name in model.SPELLINGS.items():
        home, dot, rest = spelling.rpartition(".")
        if home in model.model_fields:  # a key in a section where it does not belong: editors may say so
            continue
        holder = {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
        known = keys.setdefault(home, holder)["properties"] if dot else keys
        known[rest] = keys[name]
    keys.update({key: {"deprecated": True, "description": why} for key, why in model.IGNORED.items()})
    keys.update({key: {**_only_schema(only), "description": why} for key, (only, why) in model.ONLY.items()})


def _or_auto(entry: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key, which may also say "auto"; what is told about the key stays outside of the choice."""
    told = {what: text for what, text in entry.items() if what in ("title", "description", "default")}
    told |= {what: text for what, text in entry.items() if what.startswith("x-")}
    rest = {what: limit for what, limit in entry.items() if what not in told}
    return {**told, "anyOf": [*rest.pop("anyOf", []), *([rest] if rest else []), {"const": "auto"}]}


def _only_schema(only: object) -> dict[str, Any]:
    if isinstance(only, Mapping):
        return {"type": ["object", "null"], "properties": {key: {"const": value} for key, value in only.items()}}
    return {"const": only}


class Section(BaseModel):
    """Every section shares this. Keys of DeepSpeed that are no fields here stand in the tables."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=_accept_more,
    )
    SPELLINGS: ClassVar[Mapping[str, str]] = {}
    """Other spellings, each with the field that it sets. "section.key" is a key of a section that has no other use,
    or of one where it does not belong."""
    IGNORED: ClassVar[Mapping[str, str]] = {}
    """Keys that are accepted with a warning, each with why it has no meaning here."""
    ONLY: ClassVar[Mapping[str, tuple[object, str]]] = {}
    """Accepted, with a warning, at one value -> that value, and why no other. Of a section, only the keys
    that the value names are looked at, in it or, where it has none of them, in the sections inside it; one that is
    left out has the value named."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Keys that are refused although DeepSpeed knows them or they are planned here, each with what to do instead."""
    TRANSLATED: ClassVar[Mapping[str, tuple[str, object]]] = {}
    """Keys of `IGNORED` that are switches: where one is true -> the field that it is read as, and its value."""
    TAKEN_FOR: ClassVar[Mapping[tuple[str, object], tuple[object, str]]] = {}
    """Fields, each with a value that is none, which is read as another, and that is told -> the other, and why."""
    IS_OPEN: ClassVar[bool] = False
    """DeepSpeed ignores unknown keys in it."""
    IDLE: ClassVar[Mapping[str, tuple[str, object]]] = {}
    """Fields that a file may also have where they do nothing, which is then told -> the field, and its value, that
    they go with."""
    OTHERWISE: ClassVar[Mapping[str, str]] = {}
    """A field whose default changes results and is another in DeepSpeed -> what a section that was written for
    DeepSpeed (see `offload.config.reader`) and leaves it out is told."""

    def contradictions(self) -> Iterator[Contradiction]:
        """Return what of this section does not go together; the sections in it say so themselves."""
        return iter(())

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        if info.context is not READER and (found := list(self.contradictions())):
            text = "; ".join(f"{key}: {what}" for key, what, _ in found)
            raise PydanticCustomError("contradiction", "{text}", {"text": text})
        return self


TRUE_WORDS = ("true", "t", "1", "on", "yes", "y")
"""Pydantic takes these for true, in any case, where it is not strict."""


class DeepSpeedModel(Section):
    """A section that DeepSpeed reads with pydantic, which takes "true", "on" or 1 for true, and "5" for 5."""

    model_config = ConfigDict(strict=False)


def sections(model: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield `model` and every section below it: the dotted prefix of its keys ("aio.") and its model."""
    yield prefix, model
    for name, field in model.model_fields.items():
        if inner := section_of(field):
            yield from sections(inner, f"{prefix}{name}.")


def parts(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield `section` and every section in it that is there, as `sections` does."""
    yield prefix, section
    for name, value in section:
        if isinstance(value, Section):
            yield from parts(value, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the model of a field that is a section; None for a value, or a list of sections."""
    if get_origin(field.annotation) is tuple:
        return None
    kinds = get_args(field.annotation) or (field.annotation,)  # "Section | None" is a section that may be absent
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def takes_auto(annotation: object) -> bool:
    """Whether "auto" is a value of a field's own."""
    kinds = get_args(annotation)
    return "auto" in kinds or any(map(takes_auto, kinds))
