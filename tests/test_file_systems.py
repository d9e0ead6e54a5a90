"""On real file systems a run has the bits of one in memory, or one error in words; and the doctor says so before."""

import json
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.file_systems import GROUNDS
from tests.support.sandbox import can_mount, run_python

BEGIN, END = "<!-- file systems: made by `make filesystems` -->", "<!-- end of file systems -->"
TOOLS = {
    "e2fsprogs": ("mkfs.ext4", "-V"),
    "xfsprogs": ("mkfs.xfs", "-V"),
    "btrfs-progs": ("mkfs.btrfs", "--version"),
}
QUICK = {"ext3", "btrfs", "overlay on tmpfs"}
needs_loops = pytest.mark.skipif(
    os.geteuid() != 0 or not can_mount() or not Path("/dev/loop-control").exists(),
    reason="needs root, mount namespaces and loop devices",
)
CODE = "import sys; from tests.support.file_systems import main; main(*sys.argv[1:])"


@pytest.fixture(scope="module")
def table():
    rows = {}
    yield rows
    if written := os.environ.get("WRITE_FILE_SYSTEMS"):
        page = Path(written)
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{_table(rows)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def _table(rows):
    columns = ("doctor", "kill, resume", "full disk", "shutdown")
    lines = [f"| File system | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in sorted(rows.items(), key=lambda row: [*GROUNDS].index(row[0])):
        cells = [row.get(column, "") for column in columns] if "missing" not in row else ["not there"] * len(columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    tools = ", ".join(f"{name} {_version(*command)}" for name, command in TOOLS.items())
    return "\n".join([*lines, "", f"Linux {platform.release().partition('-')[0]} on {platform.machine()}; {tools}."])


def _version(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return "not installed"
    return re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)[0]


@needs_loops
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in GROUNDS]
)
def test_a_run_has_the_bits_of_one_in_memory_or_says_why_not(name, tmp_path, table):
    place, own = tmp_path / "place", tmp_path / "own"
    place.mkdir()
    own.mkdir()  # mounts something, so that all that follow are seen by the child alone
    done = run_python(CODE, name, place, mounts={own: "tmpfs"}, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    table[name] = json.loads(done.stdout)
    if "missing" in table[name]:
        pytest.skip(table[name]["missing"])
