"""From a user's file or dict to a section: everything wrong becomes one `ConfigError`, all that is told one warning."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..errors import UNEXPANDED, ConfigError, ConfigWarning
from ..foreign import read_text
from ..warn import warn_user
from .keys import READER, Section, parts, section_of, sections, takes_auto
from .yaml_text import parse_yaml

AnySection = TypeVar("AnySection", bound=Section)

_RESOLVER = "OffloadConfig.from_training_arguments resolves what transformers does"
_AUTO = f'"auto", and nobody to resolve it, so the default ({_RESOLVER})'

WRAPPER = "deepspeed"
"""A file, or dict, whose only top-level key is this one is read as if its value stood alone."""


def read(model: type[AnySection], data: object, source: str, problems: Mapping[str, str] | None = None) -> AnySection:
    """Read a section; the warning about what is without effect points at the caller's caller.

    Messages call it `source`. `problems` says what is known to be wrong with it already, by key. Raises ConfigError
    with every problem, by its full key, and with what to write instead.
    """
    reader = _Reader(model, problems or {})
    if is_wrapped(data):
        data, source = data[WRAPPER], f"{source}, in {WRAPPER}"
        reader.is_deepspeed = True
    section = reader.validated(model, reader.section(model, data))
    if reader.problems:
        raise ConfigError(reader.problems, source)
    told = {
        "accepted, but without effect here": reader.ignored,
        _AUTO: reader.auto,
        "left out, which means something else in DeepSpeed": list(reader.left_out()),
    }
    if any(told.values()):
        texts = ["\n  ".join([f"{source}: {what}:", *lines]) for what, lines in told.items() if lines]
        warn_user("\n".join(texts), ConfigWarning)
    return section


def is_wrapped(data: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a section stands inside a table of DeepSpeed's name, see `WRAPPER`."""
    return isinstance(data, Mapping) and list(data) == [WRAPPER]


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of the keys and values of an object in a file; ValueError: a key stands there twice."""
    section = dict(pairs)
    if len(section) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice} stands twice in one section; keep one")
    return section


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": lambda text: json.loads(text, object_pairs_hook=no_duplicates),
    ".toml": tomllib.loads,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
}


def parse_file(path: Path) -> Any:
    """Return what a .json, .toml or .yaml file says; raises ConfigError, by line and column, where it says nothing."""
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        suffixes = ".json, .toml or .yaml"
        what = f'the suffix is "{path.suffix}", and a section is a file of JSON, TOML or YAML: name it {suffixes}'
        folder = f"there is no such folder; make it on a drive, or name a section's file ({suffixes})"
        if "$" in str(path):
            folder = UNEXPANDED
        raise ConfigError([what if path.exists() else folder], str(path))
    try:
        return parse(read_text(path))
    except FileNotFoundError as error:
        remedy = f"there is no such section, seen from {Path.cwd()}; `offload init` writes one"
        raise FileNotFoundError(error.errno, remedy, str(path)) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError([f"{where}: {error.msg}; write valid JSON"], str(path)) from None
    except RecursionError:
        raise ConfigError(["is nested too deeply; write a section as the reference has it"], str(path)) from None
    except ValueError as error:  # TOML's errors name line and column; a key given twice; not UTF-8
        raise ConfigError([f"{error}; write valid {path.suffix[1:].upper()}"], str(path)) from None


class _Written(NamedTuple):
    key: str
    value: Any
    field: FieldInfo

    @property
    def remedy(self) -> str:
        return f"write {self._told('x-write')} (default {self.default})"

    @property
    def default(self) -> str:
        return self._told("x-default")

    def _told(self, what: str) -> str:
        return cast(dict[str, str], self.field.json_schema_extra)[what]


class _Reader:
    """One pass over a user's dict, before pydantic sees it: what to keep, what to ignore, what is wrong."""

    def __init__(self, root: type[Section], problems: Mapping[str, str]) -> None:
        self.root = root
        self.ignored: list[str] = []
        self.auto: list[str] = []
        """Keys that say "auto", each with the default that it means."""
        self.problems = list(problems.values())
        self.wrong = set(problems)
        """Keys whose values are wrong, of which nothing else is told."""
        self.written: dict[str, _Written] = {}  # by full key, in the spelling of the models
        self.is_deepspeed = False
        """It was written for DeepSpeed: it has a key, or a spelling of one, that means nothing anywhere else, or stands
        in a table of that name."""

    def left_out(self) -> Iterator[str]:
        """Return what a DeepSpeed section leaves out where DeepSpeed's default is another than the default here."""
        for home, model in sections(self.root):
            for name, what in model.OTHERWISE.items():
                if self.is_deepspeed and f"{home}{name}" not in self.written:
                    yield f"{home}{name}: {what}"

    def section(self, model: type[Section], data: object, prefix: str = "", shown: str = "") -> dict[str, Any]:
        """Return the part of `data` that `model` is to validate; `shown` is `prefix` as the user spells it."""
        kept: dict[str, Any] = {}
        for spelling, value in self._items(model, data, shown):
            name = model.SPELLINGS.get(spelling, spelling)
            if value is True and spelling in model.TRANSLATED:
                name, value = model.TRANSLATED[spelling]
            value = self._taken_for(model, name, value, f"{shown}{spelling}")
            self.is_deepspeed |= name != spelling
            field = model.model_fields.get(name)
            if field is None:
                self._no_field(model, prefix, shown, str(spelling), value)
                continue
            key, written = f"{prefix}{name}", _Written(f"{shown}{spelling}", value, field)
            inner = section_of(field)
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
            elif isinstance(value, set | frozenset):
                self.problems.append(f"{this}: a set has no order; {written.remedy}")
            elif value == "auto" and not takes_auto(field.annotation):
                self.auto.append(f"{written.key}: {written.default}")
                self.is_deepspeed = True
            else:
                kept[name] = value
        self._take_out_idle(model, kept, shown)
        return kept

    def _taken_for(self, model: type[Section], name: str, value: object, shown: str) -> object:
        """Return the value that this one is read as: itself, but for what `Section.TAKEN_FOR` names."""
        if not isinstance(value, str | bool) or (name, value) not in model.TAKEN_FOR:
            return value
        instead, why = model.TAKEN_FOR[name, value]
        self.ignored.append(f"{shown} = {_show(value)}: {why}")
        self.is_deepspeed = True
        return instead

    def _take_out_idle(self, model: type[Section], kept: dict[str, Any], shown: str) -> None:
        """Tell and forget keys beside another key's value with which they do nothing."""
        for name, (other, needed) in model.IDLE.items():
            found = kept.get(other, model.model_fields[other].default)
            if kept.get(name) and found != needed:
                why = f"{other} = {_show(found)}, and only {_show(needed)} uses it"
                self.ignored.append(f"{shown}{name} = {_show(kept.pop(name))}: {why}")

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
            elif key in model.model_fields:
                inside = value if isinstance(value, Mapping) else ()
                moved = [rest for rest in inside if f"{key}.{rest}" in model.SPELLINGS]
                yield key, {rest: inner for rest, inner in value.items() if rest not in moved} if moved else value
                yield from ((f"{key}.{rest}", value[rest]) for rest in moved)
            elif value is not None:
                yield from ((f"{key}.{rest}", inner) for rest, inner in self._items(Section, value, f"{shown}{key}."))

    def _no_field(self, model: type[Section], prefix: str, shown: str, name: str, value: object) -> None:
        this = f"{shown}{name} = {_show(value)}"
        only, why = model.ONLY.get(name, (value, model.IGNORED.get(name)))
        if name in model.REFUSED:
            self.problems.append(f"{this}: {model.REFUSED[name]}")
        elif why is None and (near := self._nearest(prefix, name)):
            self.problems.append(f"{this}: unknown key; {near}")
        elif why is None:  # a comment, or the key of another program
            self.ignored.append(f"{this}: nobody knows it; DeepSpeed ignores such keys there, too")
        elif not _says(value, only):
            self.problems.append(f"{this}: {why}; write {_show(only)} or leave it out")
        else:
            self.ignored.append(f"{this}: {why}")
            self.is_deepspeed = True

    def _nearest(self, prefix: str, name: str) -> str:
        """Say where an unknown key belongs, or which known key it is nearest to; in an open section perhaps nothing."""
        models = dict(sections(self.root))
        names = {home: [*of.model_fields, *of.SPELLINGS, *of.IGNORED, *of.ONLY] for home, of in models.items()}
        is_open = models[prefix].IS_OPEN
        homes = [home for home in names if name in names[home]]
        if homes and not (is_open and all(name in models[home].IGNORED for home in homes)):
            places = " or ".join(home.removesuffix(".") or "the top level" for home in homes)
            return f"{name} belongs in {places}; write {' or '.join(f'{home}{name}' for home in homes)}"
        for home in sorted(names, key=lambda home: home != prefix):  # this section first
            known = [key for key in names[home] if not is_open or key not in models[home].IGNORED]
            if near := get_close_matches(name, known, n=1, cutoff=0.75 if is_open else 0.6):
                return f"the nearest known key is {home}{near[0]}"
            if is_open:
                return ""
        return f"known keys here are {', '.join(models[prefix].model_fields)}"

    def validated(self, model: type[AnySection], kept: dict[str, Any]) -> AnySection:
        """The section, with the default for each value that is wrong; notes that, and contradictions among the rest."""
        try:
            section = model.model_validate(kept, context=READER)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = [str(part) for part in takewhile(lambda part: isinstance(part, str), detail["loc"])]
                self._add(self.written[".".join(path)], detail)
                self.wrong.add(".".join(path))
                home = kept
                for part in path[:-1]:
                    home = home[part]
                home.pop(path[-1], None)
            section = model.model_validate(kept, context=READER)
        for prefix, inner in parts(section):
            for key, what, beside in inner.contradictions():
                if self.wrong.isdisjoint(f"{prefix}{name}" for name in (key, *beside)):
                    found = self.written.get(f"{prefix}{key}")
                    this = f"{found.key} = {_show(found.value)}" if found else f"{prefix}{key} = missing"
                    is_auto = found and found.value == "auto" and not takes_auto(found.field.annotation)
                    self.problems.append(f"{this}: {what}; {_RESOLVER}" if is_auto else f"{this}: {what}")
        return section

    def _add(self, written: _Written, error: ErrorDetails) -> None:
        key, value = written.key, written.value
        for part in dropwhile(lambda part: isinstance(part, str), error["loc"]):
            if isinstance(part, int):
                key, value = f"{key}[{part}]", value[part] if part < len(value) else None
            else:
                key, value = f"{key}.{part}", value.get(part) if isinstance(value, Mapping) else None
        what = str(error.get("ctx", {}).get("error", error["msg"])).replace("Input should", "should")
        self.problems.append(f"{key} = {_show(value)}: {what}; {written.remedy}")


def _says(value: object, only: object) -> bool:
    """Whether `value` is the one value accepted, or a section that says so."""
    if not isinstance(only, Mapping):
        return value in (only, "auto")
    if not isinstance(value, Mapping):
        return value is None
    if named := only.keys() & value.keys():
        return all(value[key] in (only[key], "auto") for key in named)
    return all(_says(inner, only) for inner in value.values() if isinstance(inner, Mapping))


def _show(value: object) -> str:
    try:
        text = json.dumps(value, default=str, skipkeys=True)
    except (ValueError, RecursionError):  # thousands of digits, or of levels, or itself inside
        return f"a value that cannot be shown ({type(value).__name__})"
    return text if len(text) <= 60 else f"{text[:57]}..."
