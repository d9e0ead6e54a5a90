"""The one door to a section of an engine: where its state is, and what of the rest a test decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def section(
    path: Path | str | None = None,
    *,
    stage: int = 3,
    staging_budget: str = "4MiB",
    sub_group_size: int | None = None,
    accumulation: int | None = None,
    clip: float | None = None,
    adamw: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """State on NVMe below `path`, or in host memory without one. None leaves a key out; `more` replaces keys."""
    place = {"device": "nvme", "nvme_path": str(path)} if path else {"device": "cpu"}
    zero = {"stage": stage, "offload_optimizer": {**place, "staging_budget": staging_budget}}
    keys = {
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": adamw} if adamw is not None else None,
    }
    if sub_group_size is not None:
        zero["sub_group_size"] = sub_group_size
    return {"zero_optimization": zero, **{key: value for key, value in keys.items() if value is not None}, **more}
