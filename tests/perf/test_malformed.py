"""Files that others may have made, given to every command that reads one: each is one error, soon, without escapes."""

import json
import os
import signal
import socket
from contextlib import contextmanager, suppress

import pytest
from typer.testing import CliRunner

from nvme_offload.perf import cli
from tests.perf.documents import record

PATIENCE = 60
ESCAPE = "\x1b]0;title\x07"
KEYS = (ESCAPE, "format", "model_type", "zero_optimization")
HUGE = 10**30
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}


def text(content):
    return lambda file: file.write_text(content)


def listen(file):
    with socket.socket(socket.AF_UNIX) as made, suppress(OSError):
        made.bind(str(file))


def long(file):
    with file.open("wb") as made:
        made.truncate(1 << 40)


FILES = {
    "FIFO": os.mkfifo, "device": lambda file: file.symlink_to("/dev/zero"), "socket": listen,
    "link to itself": lambda file: file.symlink_to(file), "longer than any": long,
    "bytes": lambda file: file.write_bytes(bytes(range(256)) * 16 + b"\n"),
    "half": text('{"format": 1, "zero_optimization": {"stage": \n'), "deep": text("[" * 100_000 + "\n"),
    "deep and closed": text('{"a":' * 50_000 + "1" + "}" * 50_000 + "\n"), "list": text("[1, [2], null]\n"),
    "number": text("-1e400\n"),
    "NaN": text('{"format": NaN, "results": NaN, "model_type": NaN, "gradient_clipping": NaN}\n'),
    "more digits than are read": text("9" * 5000 + "\n"),
    "escapes": text(json.dumps(dict.fromkeys(KEYS, ESCAPE)) + "\n"),
    "model with code": text(json.dumps({"model_type": "mine", "auto_map": CODE, "zero_optimization": 1}) + "\n"),
    "lone surrogate": text(json.dumps(dict.fromkeys((*KEYS, "\ud800"), "\ud800")) + "\n"),
}  # fmt: skip
"""They are none of the files that are asked for, whichever is."""
COMMANDS = {
    "top": ["top", "--once"], "report": ["report"], "runs": ["runs"],
    "plan's bench": ["plan", "--params", "1e9", "--layers", "8", "--bench"],
    "plan's section": ["plan", "--params", "1e9", "--layers", "8", "--config"], "plan's model": ["plan", "--model"],
    "init's model": ["init", "--output", "/dev/null/a.json", "--model"], "doctor's section": ["doctor", "--config"],
}  # fmt: skip
SUFFIX = {"plan's section": ".json", "doctor's section": ".json", "top": ".jsonl", "report": ".jsonl"}


@contextmanager
def no_longer_than(seconds):
    def end(*_):
        raise AssertionError(f"it still waits after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_error(*arguments):
    """Return what a command says, which has to be an error in words."""
    with no_longer_than(PATIENCE):
        done = CliRunner().invoke(cli.app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert isinstance(done.exception, SystemExit | None), repr(done.exception)
    assert done.exit_code in (1, 2), done.output
    assert not set(done.output) & {"\x1b", "\x07"}
    return " ".join(done.output.split())


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_is_none_of_ours_is_named_in_one_error(command, kind, tmp_path):
    file = tmp_path / f"given{SUFFIX.get(command, '')}"
    FILES[kind](file)
    assert "given" in one_error(*COMMANDS[command], file)


RECORD = record(10, {"steps": 3, "achieved_depth": 1.0})
RANK = {"rank": 0, "folders": ["a"], "copies": [["a"], [], 1], "steps": {"c": 1}, "model": "", "size_bytes": 1}
RANK |= {"snapshots": [], "prepared": [], "unreadable": [], "committed_at": None, "owner": None, "problem": ""}
LIST = {"name": "r", "num_ranks": 1, "hosts": {}, "ranks": [RANK]}
BENCH = {"verified": True, "engine": {"direct": True}}
OF_RANK = {
    "rank": [HUGE, -1, "0"],
    "steps": [[1], {"c": "x"}, None],
    "copies": [[], [[], [], 1], 3, [["a"], [], HUGE]],
    "owner": [{}, [], "me"],
    "size_bytes": ["1", -1, HUGE],
}
ABSURD = {
    "top": (RECORD, {
        "time": [1e300, -1, "now", None], "started": [HUGE], "pid": [-1, [], None], "rank": [{}, "0", 1.5],
        "scalars": [[], {"steps": "3"}, {"steps": -1}, {"steps": 1, "achieved_depth": None}],
        "since": [{}, [1], {"seconds": HUGE}], "tiers": [None, {"a": 1}, {"a": {}}], "queue_depth": [0, HUGE],
        "optimizer": [None, ["[/]"]], "format": [ESCAPE, 2, HUGE, [], {}], "planned": [{"parameters": 3}],
    }),
    "runs": (LIST, {
        "num_ranks": [HUGE, 10**9, -1], "name": [None], "hosts": [[], {"0": 1}],
        "ranks": [[], *([RANK | {name: value}] for name, values in OF_RANK.items() for value in values)],
    }),
    "plan's bench": (BENCH, {"results": [[], {}, {"read": 1}, {"read": {"summary": []}}], "engine": [[], {}]}),
    "plan's model": (LLAMA, {
        "num_hidden_layers": [HUGE, 10**9, -1], "hidden_size": [0, -64, HUGE], "vocab_size": ["x"],
        "num_attention_heads": [0, HUGE], "model_type": ["none of them", None, [], ESCAPE],
    }),
}  # fmt: skip
"""By the command: a document that it takes, and values of its fields that no run, benchmark or model has."""


@pytest.mark.parametrize(
    ("command", "document"),
    [
        pytest.param(command, document | {name: value}, id=f"{command}: {name} {number}")
        for command, (document, fields) in ABSURD.items()
        for name, values in fields.items()
        for number, value in enumerate(values)
    ],
)
def test_a_document_with_an_absurd_value_is_named_in_one_error(command, document, tmp_path):
    file = tmp_path / f"given{SUFFIX.get(command, '')}"
    as_list = [document] if command == "runs" else document
    file.write_text(json.dumps(as_list) + "\n")
    assert "given" in one_error(*COMMANDS[command], file)


def test_files_of_others_beside_a_run_are_left_out_by_name(tmp_path):
    for kind, make in FILES.items():
        make(tmp_path / f"{kind}.jsonl")
    (tmp_path / "run.jsonl").write_text(json.dumps(RECORD | {"optimizer": "[/]", "host": ESCAPE}) + "\n")
    with no_longer_than(PATIENCE):
        done = CliRunner().invoke(cli.app, ["top", "--once", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "[/], rank 3 of 8" in done.stdout
    assert all(f"{kind}.jsonl" in done.stderr for kind in FILES)
    assert not set(done.output) & {"\x1b", "\x07"}
