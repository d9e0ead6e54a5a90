"""What a comparison found: read from its file, or written there, as a table and in words."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nvme_offload.perf.compare.contenders import MEMORY
from nvme_offload.perf.compare.records import Order
from nvme_offload.perf.compare.report import HEAD, problems, row
from nvme_offload.perf.compare.rounds import ITERATIONS, Found
from nvme_offload.perf.demo.options import parse_size
from nvme_offload.perf.measure.results import page, save


@dataclass(frozen=True)
class Result:
    """A comparison that has ended."""

    environment: dict[str, Any]
    """Facts of the machine, as `nvme_offload.perf.measure.environment` gives them."""
    order: Order
    """What all of them were asked for, but for who and where."""
    found: list[Found]
    """Ours first."""

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """A result that was saved.

        Raises:
            ValueError: the file is none of a comparison; names it.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            found = [Found.of_dict(entry) for entry in document["results"]]
            return cls(document["environment"], Order(**document["order"]), found)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no saved comparison ({error!r}); make one with --save") from None

    def save(self, folder: Path) -> list[Path]:
        """Write it as JSON and as a page; returns both paths."""
        document = {
            "environment": self.environment,
            "order": dataclasses.asdict(self.order),
            "results": [found.to_dict() for found in self.found],
        }
        text = page("Beside others", self.environment, HEAD, self.rows(), self.notes())
        return save(folder, "compare", json.loads(json.dumps(document)), text)

    @property
    def num_parameters(self) -> int:
        """Of the model."""
        return parse_size(self.order.size).num_parameters

    def rows(self) -> list[list[str]]:
        """The table below `HEAD`."""
        return [row(found, self.num_parameters) for found in self.found]

    def notes(self) -> list[str]:
        """What was done and what the columns mean, and why some could not train."""
        quads = max(len(found.quads) for found in self.found)
        return [
            f"{self.num_parameters:,} parameters, {self.order.tokens} tokens an iteration; bf16 compute over fp32 "
            f"masters, AdamW, clipping at 1.0; {quads} x {ITERATIONS} iterations each of ours, theirs, theirs, ours",
            "B: bytes per parameter and iteration as the kernel counts them; memory: the most resident in training",
            f"distance: of the weights at the end from those of {MEMORY.text}, over the way that those have come",
            *problems(self.found),
        ]
