"""The content of a commit is read as it was, or what no run writes is named."""

import io
from pathlib import Path

import pytest
import torch

from nvme_offload import ResumeError
from nvme_offload.optim.durable.content import Content

CONTENT = {
    "format": 1,
    "step": 3,
    "tick": 4,
    "steps": torch.ones(2, dtype=torch.int64),
    "groups": [{"lr": 0.1}],
    "client_state": {},
    "engine": {},
    "generators": {},
}


def decoded(**changes):
    buffer = io.BytesIO()
    torch.save(CONTENT | changes, buffer)
    return Content.decode(buffer.getvalue(), Path("folder"))


def test_content_is_read_as_it_was():
    assert (decoded().step, decoded().tick, decoded().groups) == (3, 4, [{"lr": 0.1}])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "3"),
        ("step", -1),
        ("tick", 2.5),
        ("steps", [1, 1]),
        ("steps", torch.ones(2)),
        ("steps", torch.ones(1, 2, dtype=torch.int64)),
        ("groups", {}),
        ("client_state", []),
        ("engine", None),
        ("generators", 7),
        ("another", 7),
    ],
)
def test_a_field_of_content_that_no_run_writes_is_named(name, value):
    with pytest.raises(
        ResumeError, match=f"folder has a manifest whose content cannot be read: .*{name}|counts of steps"
    ):
        decoded(**{name: value})
