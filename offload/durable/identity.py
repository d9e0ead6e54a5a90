"""A run goes on from what another process committed where this is equal: a JSON object, known by its digest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..errors import ResumeError
from ..storage.run_folder import read_in

PREFIX = "identity."
"""Files of a run's directory that begin so have an identity each."""

MADE_AGAIN = "is gone: the run makes it again when it is started and resumed"

Identity = Mapping[str, Any]
"""JSON values by name. ``model`` is a string that describes the model to people; the rest is up to the optimizer."""

_SHOWN = 3


def _canonical(identity: Identity) -> bytes:
    return json.dumps(identity, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Encoded(NamedTuple):
    """An identity as it is written, equal ones alike."""

    identity: Identity
    content: bytes
    digest: str
    """32 hexadecimal digits that only this identity has."""

    @classmethod
    def of(cls, identity: Identity) -> Self:
        """Encode it. Raises TypeError or ValueError if something in it is not JSON."""
        content = _canonical(identity)
        return cls(identity, content, _digest(content))


def file_name(digest: str) -> str:
    """Return the name of the file with this identity, in the run's directory on its first path."""
    return f"{PREFIX}{digest}.json"


def read_identity(folder: Path, expected: str) -> Identity:
    """Read the identity with this digest in a run's directory. Raises ResumeError if the file is gone or damaged."""
    path = folder / file_name(expected)
    try:
        content = read_in(folder, path.name)
        if _digest(content) == expected:
            found: Identity = json.loads(content)
            return found
    except FileNotFoundError:
        raise ResumeError(path, MADE_AGAIN) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ResumeError(path, f"cannot be read: {error}") from error
    raise ResumeError(path, "is damaged: it is not what its name says")


def differences(committed: Identity, own: Identity) -> list[str]:
    """Return where two identities differ, one line each: the place, what was committed, what is now."""
    return [
        f"{where}: {_brief(before)} was committed, {_brief(now)} is here"
        for where, before, now in _walk(committed, own)
    ]


def _walk(before: Any, now: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = [*before, *(name for name in now if name not in before)]
        places = {name: f"{where}.{name}" if where else str(name) for name in names}
        found = [_walk(before.get(name), now.get(name), place) for name, place in places.items()]
        return [line for lines in found for line in lines]
    if _is_list(before) and _is_list(now) and len(before) == len(now):
        found = [_walk(*pair, f"{where}[{place}]") for place, pair in enumerate(zip(before, now, strict=True))]
        return [line for lines in found for line in lines]
    return [] if _canonical({"": before}) == _canonical({"": now}) else [(where, before, now)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _brief(value: Any) -> str:
    if value is None:
        return "nothing"
    if _is_list(value) and len(value) > _SHOWN:
        return f"{len(value)} of {_brief(list(value[:_SHOWN]))} ..."
    return json.dumps(value)
