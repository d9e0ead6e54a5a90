"""From a user's file or dict to a section: what a section is, and how everything wrong becomes one `ConfigError`.

Nothing here knows a key by name: the models (`offload.config.section` and those it is made of) say which keys there
are, which of DeepSpeed's are accepted without effect and which are refused, and this module says so to the user.
"""

import json
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from nvme_offload.offload.errors import ConfigError, ConfigWarning
from nvme_offload.offload.units import KiB, format_bytes, parse_bytes

WRAPPER = "deepspeed"
"""A file, or dict, whose only top-level key is this one is read as if its value stood alone."""


def _whole(value: object) -> object:
    """Take 1e9, which is how DeepSpeed's files write element counts, for the whole number it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
ByteCount = Annotated[int, BeforeValidator(parse_bytes)]


_LEAST_BUDGET = 4 * KiB


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
    """A field of a section: default, what may be written, equivalent in DeepSpeed (and default there), unit.

    `shown` is what people read as its default, where `default` itself says nothing.
    """
    if shown is None:
        shown = "none" if default in (None, ()) else json.dumps(default)
    extra: dict[str, Any] = {"x-write": write, "x-deepspeed": deepspeed, "x-unit": unit, "x-default": shown}
    if unit == "bytes" and isinstance(default, int):
        extra |= {"type": ["integer", "string"], "x-default": format_bytes(default)}
    return Field(default=default, json_schema_extra=extra, **limits)


def each(keys: str, why: Any) -> dict[str, Any]:
    """A table of several keys, separated by spaces, that have one entry in common."""
    return dict.fromkeys(keys.split(), why)


def contradiction(key: str, what: str) -> PydanticCustomError:
    """Two keys that do not go together. `key` is the one to change, relative to the section that raises."""
    return PydanticCustomError("contradiction", "{key}: {what}", {"key": key, "what": what})


def _accept_more(schema: dict[str, Any], model: type["Section"]) -> None:
    """Let the JSON schema accept what the reader accepts: other spellings and keys without meaning."""
    keys = schema.setdefault("properties", {})
    for spelling, name in model.SPELLINGS.items():
        home, dot, rest = spelling.rpartition(".")
        holder = {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
        known = keys.setdefault(home, holder)["properties"] if dot else keys
        known[rest] = keys[name]
    keys.update({key: {"deprecated": True, "description": why} for key, why in model.IGNORED.items()})
    keys.update({key: {**_only_schema(only), "description": why} for key, (only, why) in model.ONLY.items()})


def _only_schema(only: object) -> dict[str, Any]:
    if isinstance(only, Mapping):
        return {"type": ["object", "null"], "properties": {key: {"const": value} for key, value in only.items()}}
    return {"const": only}


class Section(BaseModel):
    """What every section shares. Keys of DeepSpeed that are no fields here stand in the four tables."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=_accept_more,
    )
    SPELLINGS: ClassVar[Mapping[str, str]] = {}
    """Other spellings, each with the field that it sets. "section.key" is a key of a section that has no other use."""
    IGNORED: ClassVar[Mapping[str, str]] = {}
    """Keys that are accepted with a warning, each with why it has no meaning here."""
    ONLY: ClassVar[Mapping[str, tuple[object, str]]] = {}
    """Accepted, with a warning, at one value -> that value, and why no other. Of a section, only the keys
    that the value names are looked at, and one that is left out has the value named."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Keys that are refused although DeepSpeed knows them or they are planned here, each with what to do instead."""
    OTHERWISE: ClassVar[Mapping[str, str]] = {}
    """A field whose default changes results and is another in DeepSpeed -> what a section that was written for
    DeepSpeed (see `_Reader.is_deepspeed`) and leaves it out is told."""


AnySection = TypeVar("AnySection", bound=Section)


def sections(model: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield `model` and every section below it: the dotted prefix of its keys ("aio.") and its model."""
    yield prefix, model
    for name, field in model.model_fields.items():
        if inner := _section_of(field):
            yield from sections(inner, f"{prefix}{name}.")


def _section_of(field: FieldInfo) -> type[Section] | None:
    kinds = get_args(field.annotation) or (field.annotation,)  # "Section | None" is a section that may be absent
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _takes_auto(annotation: object) -> bool:
    kinds = get_args(annotation)
    return "auto" in kinds or any(map(_takes_auto, kinds))


def read(model: type[AnySection], data: object, source: str) -> AnySection:
    """Read a section; the warning about keys without meaning points at the caller's caller.

    Args:
        model: of the whole section.
        data: as it stands in a file.
        source: what to call it in messages.

    Raises:
        ConfigError: every problem, by its full key, with what to write instead.
    """
    reader = _Reader(model)
    if isinstance(data, Mapping) and list(data) == [WRAPPER]:
        data, source = data[WRAPPER], f"{source}, in {WRAPPER}"
        reader.is_deepspeed = True
    kept = reader.section(model, data)
    try:
        section = model.model_validate(kept)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            reader.add(detail)
    if reader.problems:
        raise ConfigError(reader.problems, source)
    told = {
        "accepted, but without effect here": reader.ignored,
        "left out, which means something else in DeepSpeed": list(reader.left_out()),
    }
    if any(told.values()):
        texts = ["\n  ".join([f"{source}: {what}:", *lines]) for what, lines in told.items() if lines]
        warnings.warn("\n".join(texts), ConfigWarning, stacklevel=3)
    return section


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice} stands twice in one section; keep one")
    return section


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": lambda text: json.loads(text, object_pairs_hook=_no_duplicates),
    ".toml": tomllib.loads,
}


def parse_file(path: Path) -> Any:
    """Return what a .json or .toml file says.

    Raises:
        ConfigError: it says nothing, by line and column.
        OSError: it cannot be read.
    """
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise ConfigError([f'the suffix is "{path.suffix}"; name the file .json or .toml'], str(path))
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError([f"{where}: {error.msg}; write valid JSON"], str(path)) from None
    except RecursionError:
        raise ConfigError(["is nested too deeply; write a section as the reference has it"], str(path)) from None
    except ValueError as error:  # TOML's errors name line and column; a key given twice; not UTF-8
        raise ConfigError([str(error)], str(path)) from None


class _Written(NamedTuple):
    """A key of a section as the user wrote it."""

    key: str
    value: Any
    field: FieldInfo

    @property
    def remedy(self) -> str:
        extra = cast(dict[str, str], self.field.json_schema_extra)
        return f"write {extra['x-write']} (default {extra['x-default']})"


class _Reader:
    """One pass over a user's dict, before pydantic sees it: what to keep, what to ignore, what is wrong."""

    def __init__(self, root: type[Section]) -> None:
        self.root = root
        self.ignored: list[str] = []
        self.problems: list[str] = []
        self.written: dict[str, _Written] = {}  # by full key, in the spelling of the models
        self.is_deepspeed = False
        """Whether the section was written for DeepSpeed: it has a key, or a spelling of one, that means nothing
        anywhere else, or stands in a table of that name."""

    def left_out(self) -> Iterator[str]:
        """What a DeepSpeed section leaves out where DeepSpeed's default is another than the default here."""
        for home, model in sections(self.root):
            for name, what in model.OTHERWISE.items():
                if self.is_deepspeed and f"{home}{name}" not in self.written:
                    yield f"{home}{name}: {what}"

    def section(self, model: type[Section], data: object, prefix: str = "", shown: str = "") -> dict[str, Any]:
        """Return the part of `data` that `model` is to validate; `shown` is `prefix` as the user spells it."""
        kept: dict[str, Any] = {}
        for spelling, value in self._items(model, data, shown):
            name = model.SPELLINGS.get(spelling, spelling)
            self.is_deepspeed |= name != spelling
            field = model.model_fields.get(name)
            if field is None:
                self._no_field(model, prefix, shown, str(spelling), value)
                continue
            key, written = f"{prefix}{name}", _Written(f"{shown}{spelling}", value, field)
            inner = _section_of(field)
            if inner and value is None:  # null is an absent section, as in DeepSpeed
                continue
            first = self.written.setdefault(key, written)
            this = f"{written.key} = {_show(value)}"
            if first is not written:
                if first.value != value:
                    other = f"{first.key} = {_show(first.value)}"
                    self.problems.append(f"{this}: {other} is another spelling of it; keep {key}")
            elif inner:
                kept[name] = self.section(inner, value, f"{key}.", f"{written.key}.")
            else:
                if isinstance(value, set | frozenset):
                    self.problems.append(f"{this}: a set has no order; {written.remedy}")
                    continue
                kept[name] = value
                if value == "auto" and not _takes_auto(field.annotation):
                    self.problems.append(f'{this}: Hugging Face\'s "auto" is not resolved here; {written.remedy}')
        return kept

    def _items(self, model: type[Section], data: object, shown: str) -> Iterator[tuple[str, Any]]:
        """Yield keys and values; those of a section that only holds other spellings, as "section.key"."""
        if not isinstance(data, Mapping):
            name = shown.removesuffix(".") or "the whole"
            self.problems.append(f'{name} = {_show(data)}: is not a section; write {{"key": value, ...}}')
            return
        homes = {spelling.split(".")[0] for spelling in model.SPELLINGS if "." in spelling}
        for key, value in data.items():
            if key not in homes:
                yield key, value
            elif value is not None:
                yield from ((f"{key}.{rest}", inner) for rest, inner in self._items(Section, value, f"{shown}{key}."))

    def _no_field(self, model: type[Section], prefix: str, shown: str, name: str, value: object) -> None:
        this = f"{shown}{name} = {_show(value)}"
        only, why = model.ONLY.get(name, (value, model.IGNORED.get(name)))
        if name in model.REFUSED:
            self.problems.append(f"{this}: {model.REFUSED[name]}")
        elif why is None:
            self.problems.append(f"{this}: unknown key; {self._nearest(prefix, name)}")
        elif not _says(value, only):
            self.problems.append(f"{this}: {why}; write {_show(only)} or leave it out")
        else:
            self.ignored.append(f"{this}: {why}")
            self.is_deepspeed = True

    def _nearest(self, prefix: str, name: str) -> str:
        """Say where an unknown key belongs, or which known key it is nearest to."""
        models = dict(sections(self.root))
        names = {
            home: [*model.model_fields, *model.SPELLINGS, *model.IGNORED, *model.ONLY] for home, model in models.items()
        }
        if homes := [home for home in names if name in names[home]]:
            places = " or ".join(home.removesuffix(".") or "the top level" for home in homes)
            return f"{name} belongs in {places}; write {' or '.join(f'{home}{name}' for home in homes)}"
        for home in sorted(names, key=lambda home: home != prefix):  # this section first
            if near := get_close_matches(name, names[home], n=1):
                return f"the nearest known key is {home}{near[0]}"
        return f"known keys here are {', '.join(models[prefix].model_fields)}"

    def add(self, error: ErrorDetails) -> None:
        """Say in one line what pydantic found wrong."""
        where, context = error["loc"], error.get("ctx", {})
        if error["type"] == "contradiction":
            key = ".".join(map(str, (*where, context["key"])))
            found = self.written.get(key)
            this = f"{found.key} = {_show(found.value)}" if found else f"{key} = missing"
            self.problems.append(f"{this}: {context['what']}")
            return
        written = self.written[".".join(part for part in where if isinstance(part, str))]
        if written.value != "auto":  # already said
            key, value = written.key, written.value
            for index in (part for part in where if isinstance(part, int)):
                key, value = f"{key}[{index}]", value[index] if index < len(value) else None
            what = str(context.get("error", error["msg"])).replace("Input should", "should")
            self.problems.append(f"{key} = {_show(value)}: {what}; {written.remedy}")


def _says(value: object, only: object) -> bool:
    """Whether `value` is the one value accepted, or a section that says so."""
    if not isinstance(only, Mapping):
        return value == only
    return value is None or (isinstance(value, Mapping) and all(value.get(key, only[key]) == only[key] for key in only))


def _show(value: object) -> str:
    try:
        text = json.dumps(value, default=str, skipkeys=True)
    except (ValueError, RecursionError):  # thousands of digits, or of levels, or itself inside
        return f"a value that cannot be shown ({type(value).__name__})"
    return text if len(text) <= 60 else f"{text[:57]}..."
