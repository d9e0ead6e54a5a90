"""An experiment from its command line: what it saved, and what it said."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.testing import CliRunner

from nvme_offload.perf.experiments.__main__ import app


def said(*arguments, status=0):
    """The words of an experiment that ends with this exit status, on one line."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == status, done.output
    return " ".join(done.output.replace("│", " ").split())


def found(*arguments):
    """The document that an experiment saved."""
    with TemporaryDirectory() as folder:
        said(*arguments, "--save", folder)
        [file] = Path(folder).glob("*.json")
        return json.loads(file.read_text())


def results(*arguments):
    """What an experiment saved of each case, by the case's name."""
    return {each["name"]: each for each in found(*arguments)["results"]}
