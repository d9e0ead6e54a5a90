"""The section on the page about DeepSpeed is read as it stands there."""

import json
import re
import warnings
from pathlib import Path

from nvme_offload import ConfigWarning, OffloadConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_deepspeed.md"


def test_the_section_of_the_page_is_read():
    [block] = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = OffloadConfig.of(json.loads(block))
    assert [warning.category for warning in caught] == [ConfigWarning]
    said = str(caught[0].message)
    for key in ("overlap_comm", "contiguous_gradients", "reduce_bucket_size", "thread_count", "fast_init"):
        assert key in said
    assert config.zero_optimization.offload_param.device == "nvme"
    assert config.optimizer.hyperparameters["betas"] == (0.8, 0.999)
    assert (config.aio.queue_depth, config.aio.block_size) == (8, 1 << 20)
