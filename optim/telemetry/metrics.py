"""Numbers by name in the forms in which monitors take them."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Collection, Mapping
from functools import cache
from textwrap import dedent

PREFIX = "nvme_offload_"
"""Every name in Prometheus begins with this."""


@cache
def field_texts(of: type) -> dict[str, str]:
    """Return the docstring under each field of a class, in one line; a field without one is left out."""
    body = ast.parse(dedent(inspect.getsource(of))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).replace("``", "").split())
    return texts


def prometheus_text(
    values: Mapping[str, float],
    texts: Mapping[str, str],
    gauges: Collection[str],
    labels: Mapping[str, object],
    facts: Mapping[str, object],
) -> str:
    """Return values in the text exposition format of Prometheus, version 0.0.4.

    `gauges` go up and down; the others only grow, and get the suffix ``_total``. `facts` label a metric that is 1.
    """
    lines: list[str] = []
    for name, value in values.items():
        kind, full = ("gauge", name) if name in gauges else ("counter", f"{name}_total")
        lines += _metric(PREFIX + full, kind, texts.get(name, ""), labels, value)
    return "".join(f"{line}\n" for line in [*lines, *_metric(f"{PREFIX}info", "gauge", "", {**labels, **facts}, 1)])


def _metric(name: str, kind: str, text: str, labels: Mapping[str, object], value: float) -> list[str]:
    shown = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
    head = [f"# HELP {name} {text}"] if text else []
    return [*head, f"# TYPE {name} {kind}", f"{name}{f'{{{shown}}}' if shown else ''} {_number(value)}"]


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(value)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
