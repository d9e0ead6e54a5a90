"""The training text: the source of Python's own standard library, as bytes."""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

SKIPPED_DIRECTORIES = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
LEAST_FILES = 40
SEPARATOR = b"\0"


class Corpus(NamedTuple):
    """Bytes to train on, and what they were made from."""

    text: bytes
    num_files: int
    sha256: str


def find_sources(root: Path) -> list[Path]:
    """All modules below `root` but tests and installed packages, in an order that is the same everywhere."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in files if not SKIPPED_DIRECTORIES & set(path.parts[:-1])]
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads the library.

    Args:
        root: The library's directory; by default the running interpreter's.

    Raises:
        FileNotFoundError: There is too little source there, as in an interpreter that ships only byte code.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    sources = find_sources(root)
    if len(sources) < LEAST_FILES:
        raise FileNotFoundError(
            f"{root} holds {len(sources)} Python source files, at least {LEAST_FILES} are needed: "
            "this interpreter comes without its library's source"
        )
    text = SEPARATOR.join(path.read_bytes() for path in sources)
    return Corpus(text, len(sources), hashlib.sha256(text).hexdigest())
