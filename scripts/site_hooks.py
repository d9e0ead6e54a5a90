"""Hooks of the documentation site: pages of the public names, and links out of docs/ that lead to the source.

The pages in docs/ are read in a checkout as they are; what only the site needs is added here while it is built.
"""

import ast
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "src" / "nvme_offload" / "__init__.pyi"
LINK = re.compile(r"(?<=\]\()(?P<target>(?:\.\./)+[^)#\s]*)")
MARKED = re.compile(r"^(?P<fence>`{3}\w+) (?:runnable|output)$", re.MULTILINE)

# Page, title, what its public names are imported from; a name belongs to the first page that has its module.
PAGES = (
    ("errors", "Errors", ("offload.errors", "aio_native.engine")),
    ("tensors", "Tensors by name", ("offload.swapper", "offload.activations", "offload.storage", "aio_native.faults")),
    ("values", "Full values and weights", ("optim.access.full_values", "offload.weights")),
    (
        "training",
        "Training engine and section",
        ("offload.config", "optim.zero", "optim.stats", "optim.tiers", "optim.trace"),
    ),
    ("adapters", "Others' trainers", ("adapters",)),
    ("optimizers", "Optimizers", ("optim",)),
)


def public_names() -> dict[str, list[str]]:
    """Public names by the page that describes them, in the order of the stub."""
    pages: dict[str, list[str]] = {page: [] for page, _, _ in PAGES}
    for statement in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            home = statement.module.removeprefix("nvme_offload.")
            page = next(page for page, _, homes in PAGES if any(f"{home}.".startswith(f"{part}.") for part in homes))
            pages[page] += [name.name for name in statement.names]
    return pages


@functools.cache
def source_url() -> str:
    """Where the source is browsed, from the project's metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Source"]).rstrip("/")


def on_config(config: Any) -> Any:
    """The metadata's address is the site's too, so that it is written down once."""
    config.repo_url = source_url()
    config.repo_name = config.site_name
    return config


IN_PARTS = ("OffloadEngine", "OffloadOptimizer")
"""Classes whose methods stand in several rooms: what they inherit is theirs."""


def _entry(name: str) -> str:
    options = "\n    options:\n      inherited_members: true" if name in IN_PARTS else ""
    return f"::: nvme_offload.{name}{options}"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds a page for each group of public names."""
    titles = {page: title for page, title, _ in PAGES}
    for page, names in public_names().items():
        content = "\n\n".join([f"# {titles[page]}", *map(_entry, names)])
        files.append(File.generated(config, f"reference/{page}.md", content=content + "\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Points links that leave docs/ at the source, and takes the mark off blocks that the tests run."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def at_source(match: re.Match[str]) -> str:
        path = (folder / match["target"]).resolve()
        if not path.is_relative_to(ROOT) or path.is_relative_to(config.docs_dir):
            return match["target"]
        kind = "tree" if path.is_dir() else "blob"
        return f"{source_url()}/{kind}/main/{path.relative_to(ROOT).as_posix()}"

    return MARKED.sub(r"\g<fence>", LINK.sub(at_source, markdown))
