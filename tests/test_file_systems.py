"""On real file systems a run has the bits of one in memory, or one error in words; and the doctor says so before."""

import json
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.file_systems import GROUNDS
from tests.support.sabotaged import SABOTAGES
from tests.support.sandbox import can_mount, run_python

COLUMNS = {
    "storage.md": ("File system", "doctor", "kill, resume", "full disk", "copy", "freeze", "read-only", "shutdown"),
    "doctor.md": ("Folder", "doctor", "exit status", "a run there"),
}
BEGIN, END = "<!-- file systems: made by `make filesystems` -->", "<!-- end of file systems -->"
TOOLS = {
    "e2fsprogs": ("mkfs.ext4", "-V"),
    "xfsprogs": ("mkfs.xfs", "-V"),
    "btrfs-progs": ("mkfs.btrfs", "--version"),
    "bindfs": ("bindfs", "--version"),
}
QUICK = {"overlay on tmpfs", "XFS, blocks of 64 KiB"} | {"immutable", "a dangling link", "short files"}
needs_loops = pytest.mark.skipif(
    os.geteuid() != 0 or not can_mount() or not Path("/dev/loop-control").exists(),
    reason="needs root, mount namespaces and loop devices",
)
CODE = "import sys; from tests.support.{} import main; main(*sys.argv[1:])"


@pytest.fixture(scope="module")
def rows():
    """Rows of the tables in docs, by page and name."""
    made = {page: {} for page in COLUMNS}
    yield made
    if folder := os.environ.get("WRITE_FILE_SYSTEMS"):
        for page, found in made.items():
            path = Path(folder, page)
            before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
            lines = "\n".join(_table(COLUMNS[page], found))
            path.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def _table(columns, rows):
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for name in sorted(rows, key=[*GROUNDS, *SABOTAGES].index):
        missing = "not there" if "missing" in rows[name] else ""
        yield f"| {' | '.join([name, *(str(rows[name].get(column, missing)) for column in columns[1:])])} |"
    tools = ", ".join(f"{name} {_version(*command)}" for name, command in TOOLS.items())
    yield from ("", f"Linux {platform.release().partition('-')[0]} on {platform.machine()}; {tools}.")


def _version(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return "not installed"
    return re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)[0]


def _cases(of):
    return pytest.mark.parametrize(
        "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in of]
    )


def _seen(support, name, tmp_path):
    place, own = tmp_path / "place", tmp_path / "own"
    place.mkdir()
    own.mkdir()  # mounts something, so that all that follow are seen by the child alone
    done = run_python(CODE.format(support), name, place, mounts={own: "tmpfs"}, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_loops
@_cases(GROUNDS)
def test_a_run_has_the_bits_of_one_in_memory_or_says_why_not(name, tmp_path, rows):
    seen = rows["storage.md"][name] = _seen("file_systems", name, tmp_path)
    if "missing" in seen:
        pytest.skip(seen["missing"])


@needs_loops
@_cases(SABOTAGES)
def test_the_doctor_has_the_verdict_of_a_run_in_a_spoiled_folder(name, tmp_path, rows):
    seen, sabotage = _seen("sabotaged", name, tmp_path), SABOTAGES[name]
    rows["doctor.md"][name] = seen
    if "missing" in seen:
        pytest.skip(seen["missing"])
    document, ended = seen.pop("document"), seen.pop("ended")
    (group,) = [group for group in document["groups"] if group["title"].startswith("Path ")]
    said = [finding["found"] for finding in group["findings"] if finding["level"] in ("warning", "error")]
    assert document["exit_status"] == sabotage.status, document
    assert any(sabotage.found in text for text in said) or not (said or sabotage.found), said
    if not sabotage.error:
        assert ended == seen["expected"], "a run ends otherwise"
    else:
        assert sabotage.error in ended.partition("; ")[0], ended
        assert "Traceback" not in ended
    left = [left for left in seen["left"] if left.startswith(".offload-doctor")]
    assert not left or name == "append-only", left
    rows["doctor.md"][name] = {
        "doctor": sabotage.found or "ok",
        "exit status": document["exit_status"],
        "a run there": sabotage.error or "equal",
    }
