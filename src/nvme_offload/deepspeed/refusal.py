"""A call that is not done here is refused by its own name."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

PAGE = "docs/from_deepspeed.md says what to write instead"


def refuse_arguments(call: str, given: Mapping[str, Any], **only: Any) -> None:
    """Raise TypeError for an argument that a call does not have, or that has another value than the only one here."""
    for name, value in given.items():
        if name not in only:
            raise TypeError(f"{call} has no argument {name!r}")
        if value != only[name]:
            raise TypeError(f"{call}: {name} = {value!r} is not done here; write {only[name]!r}. {PAGE}")


def refused_names(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module that has names of DeepSpeed's: AttributeError for all others."""

    def refused(name: str) -> NoReturn:
        what = "is not there" if name.startswith("__") else f"has no {name}, which DeepSpeed may have"
        raise AttributeError(f"{module} {what}: {PAGE}", name=name, obj=sys.modules.get(module))

    return refused


def not_done(name: str) -> Callable[..., NoReturn]:
    """Make what scripts import at their top whatever they do, and that is refused when it is called."""

    def refused(*unused: Any, **also_unused: Any) -> NoReturn:
        raise TypeError(f"{name} is not done here: {PAGE}")

    return refused
