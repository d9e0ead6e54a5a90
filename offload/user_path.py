"""A path as a user writes it may begin with `~`."""

import os
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder in place of `~`, as a shell does; ValueError if `~name` is no user here."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        own = f"./{os.fspath(path)}"
        raise ValueError(f"{os.fspath(path)!r}: there is no such user; write {own!r} for a name with '~'") from None
