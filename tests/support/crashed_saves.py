"""Saves of a small engine whose every file operation is recorded, and what the next run finds after a crash."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvme_offload import initialize
from nvme_offload.optim.checkpoint import files
from nvme_offload.optim.checkpoint.run_state import STATE
from tests.support import build
from tests.support.killed_saves import digest_of
from tests.support.power_loss import Crash, Recording

STRANGERS = {
    "notes.txt": b"mine",
    "old.notes/a": b"b",
    "theirs.partial/state.json": b"{}",
    "theirs.replaced/__0_0.distcp": b"bytes",
    "link.partial": "old.notes",
}
"""What others have in the folder, some of it named as ours; of a link where it leads."""


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


section = partial(build.section, stage=2, adamw={"lr": 1e-2}, bf16={"enabled": True})


def small_engine(seed: int = 0, path: Path | None = None) -> Any:
    """An engine whose checkpoint has 30 kB, so that thousands of them are quickly looked at."""
    torch.manual_seed(seed)
    return initialize(small_model(), section(path))


def train(engine: Any, step: int) -> None:
    torch.manual_seed(step)
    engine.backward(engine(torch.randn(3, 8)).float().square().mean())
    engine.step()


def put_strangers(folder: Path, strangers: Mapping[str, bytes | str] = STRANGERS) -> None:
    """Files with their bytes, and links with where they lead."""
    for name, content in strangers.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def strangers_are_whole(folder: Path) -> bool:
    for name, content in STRANGERS.items():
        path = folder / name
        there = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        if there != content:
            return False
    return True


def found_by_the_next_run(root: Path) -> tuple[str, Any]:
    """Name of the folder that is loaded, and its manifest with every file verified; ``("", None)``: nothing is there.

    Raises:
        CheckpointError: a mixture, or something damaged.
    """
    folder = files.find(root, None)
    if folder is None:
        return "", None
    manifest = files.read_manifest(folder)
    for name, record in manifest.items():
        files.verify(folder / name, record)
    return folder.name, manifest


class SaveCase:
    """One save of the small engine, recorded, and the rules for what a crash in it may leave.

    Args:
        folder: to work in; must be empty.
        earlier: tag of a checkpoint that is there before; "": nothing was ever saved.
        tag: of the save.
        without_marker: the earlier one comes from a version that made no markers.
    """

    def __init__(self, folder: Path, earlier: str, tag: str, *, without_marker: bool = False) -> None:
        self.folder, self.tag = folder / "drive", tag
        self._copy = folder / "copy"
        self.folder.mkdir()
        root = self.folder / "runs" / "a" if not earlier else self.folder
        self._root = root.relative_to(self.folder)
        self.before: Any = None
        with small_engine() as engine:
            train(engine, 0)
            self.digests = [digest_of(engine)]
            """Of the engine as it was saved earlier, and as it is saved."""
            if earlier:
                put_strangers(root)
                engine.save_checkpoint(root, earlier)
                self.before = files.read_manifest(root / earlier)
                if without_marker:
                    (root / earlier / files.MARKER).unlink()
            train(engine, 1)
            self.digests.append(digest_of(engine))
            with Recording(self.folder) as recording:
                engine.save_checkpoint(root, tag)
                recording.mark("saved")
        self.history = recording.history()
        self.after = files.read_manifest(root / tag)
        self._kept = {earlier} - {""}
        self.strangers = {name.split("/")[0] for name in STRANGERS} if earlier else set()

    def restore(self, crash: Crash) -> Path:
        """The folder of the checkpoints as the crash left it."""
        shutil.rmtree(self._copy, ignore_errors=True)
        return crash.restore(self._copy) / self._root

    def problem(self, crash: Crash) -> str:
        """What is wrong after a crash; nothing, if all is as it must be."""
        root = self.restore(crash)
        allowed = [self.after] if "saved" in crash.marks else [self.before, self.after]
        try:
            if found_by_the_next_run(root)[1] not in allowed:
                return "neither the checkpoint before nor, or not yet, the one after"
            save_again(root, self.tag)
        except (OSError, RuntimeError, ValueError) as error:
            return repr(error)
        ours = {self.tag, files.LATEST, *self._kept}
        if (left := {path.name for path in root.iterdir()}) != ours | self.strangers:
            return f"left behind or lost: {sorted(left ^ (ours | self.strangers))}"
        if self.strangers and not strangers_are_whole(root):
            return "something of somebody else's was changed"
        return ""

    def problems(self, crashes: Any) -> list[str]:
        """Of all crashes, each with what led to it."""
        found = ((self.problem(crash), crash) for crash in crashes)
        return [f"{problem}: {crash}" for problem, crash in found if problem]

    def is_noticed(self, crashes: Any) -> bool:
        """Whether any of the crashes has a problem."""
        return any(map(self.problem, crashes))


def save_again(root: Path, tag: str) -> None:
    """What the next save does around the bytes of its tensors."""
    root.mkdir(parents=True, exist_ok=True)
    partial = files.begin(root, tag)
    files.write_manifest(partial, {STATE: files.write_durably(partial / STATE, b"{}")})
    files.publish(partial, tag)
    assert found_by_the_next_run(root)[0] == tag


def load_quietly(engine: Any, root: Path) -> None:
    """Load what is there; without a word where that is nothing, or gives up a loss scale."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.load_checkpoint(root)
