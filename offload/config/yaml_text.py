"""Sections in YAML: words and numbers as YAML 1.2 has them, no key twice, no aliases."""

import re
from typing import Any, ClassVar

from ..errors import ConfigError

_PLAIN = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+0123456789."),
}
"""Words without quotes are these by the core schema of YAML 1.2, and begin so. PyYAML follows 1.1, in which ``off`` is
false and ``1e-4`` is a word."""

_OF_ACCELERATE = {"compute_environment", "deepspeed_config", "distributed_type"}


def parse_yaml(text: str) -> Any:
    """Return what a document says; raises ValueError, by line and column, and ConfigError where PyYAML is missing."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(["a section in YAML needs PyYAML: pip install pyyaml, or write it in JSON or TOML"]) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise ValueError(f"line {mark.line + 1}, column {mark.column + 1}: an alias; write the value")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [each.value for each, _ in node.value]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"line {node.start_mark.line + 1}: {twice} stands twice in one section; keep one")
            return super().construct_mapping(node, deep)

    for kind, (pattern, begins) in _PLAIN.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), list(begins))
    try:
        found = yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ValueError(f"{where}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    if isinstance(found, dict) and found.keys() & _OF_ACCELERATE:
        raise ValueError("a YAML of accelerate's is no section, but may name one, as its deepspeed_config_file")
    return found
