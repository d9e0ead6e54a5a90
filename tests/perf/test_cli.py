"""The `offload` command before any of its parts is loaded."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import nvme_offload
from nvme_offload.perf import cli
from tests.support.forked import printed

HEAVY = {"torch", "numpy", "pydantic", "nvme_offload.offload", "nvme_offload.perf.bench"}
"""Loaded with the command that needs them; torch alone takes seconds."""


def python(*arguments):
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("asked", [["--help"], ["--version"], []])
def test_help_and_version_load_nothing_heavy(asked):
    code = f"""
import sys
from nvme_offload.perf.cli import app
try:
    app({asked}, prog_name="offload")
except SystemExit as end:
    assert end.code == {0 if asked else 2}
print("loaded", *sorted({HEAVY} & sys.modules.keys()))
"""
    done = python("-c", code)
    assert printed(done).endswith("loaded\n"), done.stdout
    assert "offload" in done.stdout + done.stderr


def test_what_is_loaded_with_a_command_is_freed_at_the_end():
    """Libraries count what they have then: Triton's binding lists what is left as leaked, in 30 lines."""
    code = """
import os
import sys
from nvme_offload.perf.cli import app

class Loaded:
    def __del__(self, write=os.write):
        write(1, b"freed")

class LoadedWithTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            loaded = Loaded()
            loaded.itself = loaded

sys.meta_path.insert(0, LoadedWithTorch())
app(["runs", "--help"], prog_name="offload")
"""
    assert printed(python("-c", code)).endswith("freed")


def test_the_module_is_the_command():
    done = python("-m", "nvme_offload", "--version")
    assert (done.returncode, done.stdout) == (0, f"offload {nvme_offload.__version__}\n")
    said = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"}).output
    assert all(command.help in said for command in cli.COMMANDS.values())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_that_is_known_up_front_is_that_of_the_command(name):
    loaded = cli.load(name)
    assert " ".join(loaded.help.split("\n\n")[0].split()) == cli.COMMANDS[name].help
    done = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert f"Usage: offload {name} [OPTIONS]" in done.output
    example = cli.COMMANDS[name].example
    assert f"Example: {example}" in " ".join(done.output.split())
    loaded.make_context(name, example.split()[2:])  # its options are known, and their values are read


def test_a_command_that_is_not_there():
    done = CliRunner().invoke(cli.app, ["bensh"])
    assert done.exit_code == 2
    assert "No such command 'bensh'. Did you mean 'bench'?" in " ".join(done.output.split())
