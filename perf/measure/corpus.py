"""The training text: the source of Python's own standard library, as bytes."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SKIPPED_DIRECTORIES = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
VALIDATION_EVERY = 40
SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, bytes held out, and what they were made from."""

    train: bytes
    validation: bytes
    num_files: int
    sha256: str


def find_sources(root: Path) -> list[Path]:
    """All modules below `root` but tests and installed packages, in an order that is the same everywhere."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in files if not SKIPPED_DIRECTORIES & set(path.parts[:-1])]
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads the library; every fortieth file is held out for validation.

    Args:
        root: The library's directory; by default the running interpreter's.

    Raises:
        FileNotFoundError: There is too little source there, as in an interpreter that ships only byte code.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    sources = find_sources(root)
    if len(sources) < VALIDATION_EVERY:
        raise FileNotFoundError(
            f"{root} holds {len(sources)} Python source files, at least {VALIDATION_EVERY} are needed: "
            "this interpreter comes without its library's source"
        )
    held_out = sources[VALIDATION_EVERY // 2 :: VALIDATION_EVERY]
    train = SEPARATOR.join(path.read_bytes() for path in sources if path not in set(held_out))
    validation = SEPARATOR.join(path.read_bytes() for path in held_out)
    digest = hashlib.sha256(train + SEPARATOR + validation).hexdigest()
    return Corpus(train=train, validation=validation, num_files=len(sources), sha256=digest)
