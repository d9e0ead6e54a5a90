"""Nothing in a section is dropped in silence: who reads only a part of it names the rest."""

import json
import warnings

import pytest
import torch

from nvme_offload import ConfigWarning, OffloadAdamW, OffloadLion, TensorSwapper, initialize

WHOLE = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 1.0,
    "aio": {"queue_depth": 8},
    "gradient_accumulation_steps": 4,
    "train_batch_size": 8,
    "fp16": {"enabled": True},
    "bf16": {"enabled": False},
    "communication_data_type": "fp32",
    "fp32_modules": ["LayerNorm"],
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "scheduler": {"type": "WarmupLR"},
}
UNREAD = (
    "train_batch_size, gradient_accumulation_steps, fp16, communication_data_type, fp32_modules, optimizer, scheduler"
)


def params():
    return [torch.nn.Parameter(torch.zeros(8))]


@pytest.mark.parametrize("kind", [OffloadAdamW, OffloadLion])
@pytest.mark.parametrize("as_file", [False, True])
def test_an_optimizer_names_the_keys_that_only_initialize_honours(tmp_path, kind, as_file):
    path = tmp_path / "offload.json"
    path.write_text(json.dumps(WHOLE))
    with pytest.warns(ConfigWarning) as caught, kind(params(), offload=path if as_file else WHOLE):
        pass
    [warning] = caught
    assert f"{kind.__name__} does not honour these keys of the section: {UNREAD}. " in str(warning.message)
    assert "nvme_offload.initialize does" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    "more", [{}, {"fp16": {"enabled": False, "loss_scale": 0}}, {"gradient_accumulation_steps": 1}, {"scheduler": None}]
)
def test_what_asks_for_nothing_is_not_named(more):
    read = {key: WHOLE[key] for key in ("zero_optimization", "gradient_clipping", "aio")}
    with warnings.catch_warnings(action="error"), OffloadAdamW(params(), offload={**read, **more}):
        pass


def test_initialize_honours_them_and_says_nothing(alone):
    section = {key: value for key, value in WHOLE.items() if key != "fp32_modules"}
    with warnings.catch_warnings(action="error"), initialize(torch.nn.Linear(4, 4), section) as engine:
        assert engine.optimizer.config.gradient_clipping == engine.config.gradient_clipping == 1.0
        assert engine.optimizer.config.gradient_accumulation_steps == 4
        assert engine.optimizer.config.zero_optimization == engine.config.zero_optimization
        assert type(engine.optimizer).__name__ == "OffloadSGD"


def test_a_swapper_names_what_it_does_not_read(tmp_path):
    nvme = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with pytest.warns(ConfigWarning, match="TensorSwapper does not honour .*: gradient_clipping, fp16") as caught:
        TensorSwapper({**nvme, "gradient_clipping": 1.0, "fp16": {"enabled": True}}).close()
    assert [warning.filename for warning in caught] == [__file__]
