"""An engine whose forwards keep what they save on NVMe trains as one without: bits, whatever else the section says.

In every precision: durable/test_drawn_runs.py.
"""

import errno

import pytest
import torch

from nvme_offload import ConfigError, SwapIOError, get_full_param, initialize
from nvme_offload.optim.telemetry.run_record import bytes_moved, read_records
from tests.support import build
from tests.support.activations import KEEPS, KiB, Layers
from tests.support.failing_drive import Failing, Op
from tests.support.pairs import each_value_once
from tests.support.sharded_model import CASTS_AGAIN, GOES_ON
from tests.support.small_llama import llama, rows, t5
from tests.support.training import assert_same_bits

pytestmark = pytest.mark.usefixtures("alone")
BF16 = {"bf16": {"enabled": True}}


def kept(path, keep, device="nvme"):
    place = {"device": "nvme", "nvme_path": str(path)} if device == "nvme" else {"device": device}
    return {"activations": {"keep": keep, "host_budget": 8 * KiB, "min_bytes": 0, **place}}


def trained(path, forward, model, more, activations, *, parameters_away=False):
    """Losses and weights of two steps of two micro-batches, and what was kept."""
    config = build.section(path, accumulation=2, clip=0.5, **more, **activations)
    if parameters_away:
        away = {"device": "nvme", "nvme_path": str(path)}
        config["zero_optimization"]["offload_param"] = config["offload_gradients"] = away
    losses = []
    with initialize(model, config) as engine:
        for step in range(2):
            for micro in range(2):
                loss = forward(engine, 2 * step + micro)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
        weights = {name: get_full_param(param) for name, param in engine.named_parameters()}
        return losses, weights, engine.activations.stats() if engine.activations else None


def of_layers(engine, number):
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(number))
    return engine(x).float().square().mean()


def layers(**options):
    torch.manual_seed(0)
    return Layers(4, **options)


def check(tmp_path, forward, make, more, keep, *, devices=("nvme",), **options):
    """The same bits with what is kept on a drive, the last of `devices`. Returns what was kept there."""
    expected = trained(tmp_path, forward, make(), more, {}, **options)
    for device in devices:
        torch.manual_seed(0)
        actual = trained(tmp_path, forward, make(), more, kept(tmp_path, keep, device), **options)
        assert_same_bits(actual[:2], expected[:2])
        assert actual[2].num_kept == actual[2].held_bytes == 0
        assert bool(actual[2].written_bytes) == bool(actual[2].read_bytes) == (device == "nvme")
        assert list(tmp_path.iterdir()) == []
    return actual[2]


def test_what_has_the_shape_of_a_weight_reads_no_state(tmp_path, monkeypatch):
    with initialize(layers(), build.section(tmp_path, **BF16, **kept(tmp_path, "all"))) as engine:
        monkeypatch.setattr("nvme_offload.optim.access.split.StateParts.read", None)
        engine(torch.randn(64, 64))


@CASTS_AGAIN
@pytest.mark.filterwarnings("ignore:overlap_step = :UserWarning")
@pytest.mark.parametrize("keep", KEEPS)
def test_parameters_and_gradients_on_the_drive(tmp_path, tmp_path_factory, keep):
    """Gathered parameters are in staging buffers then, which others get. The record of the run has all their bytes."""
    log = tmp_path_factory.mktemp("log") / "run.jsonl"
    more, devices = BF16 | {"run_log": str(log)}, ("cpu", "nvme")
    kept = check(tmp_path, of_layers, layers, more, keep, devices=devices, parameters_away=True)
    scalars = read_records(log)[-1]["scalars"]
    moved = kept.written_bytes, kept.read_bytes
    assert (scalars["activation_bytes_written"], scalars["activation_bytes_read"]) == moved
    assert scalars["activation_wait_seconds"] == kept.seconds_waiting > 0
    assert bytes_moved(scalars, "written") > kept.written_bytes + scalars["param_bytes_written"]


@pytest.mark.parametrize(("checkpointed", "keep"), each_value_once(["reentrant", "not reentrant"], KEEPS))
def test_blocks_that_are_checkpointed_are_not_checkpointed_again(tmp_path, checkpointed, keep):
    calls = []

    def make():
        model = layers(dropout=0.2, checkpointed=checkpointed)
        model.layers[0].register_forward_pre_hook(lambda module, _: calls.append(module))
        return model

    def forward(engine, number):
        torch.manual_seed(number)
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(number)).requires_grad_()
        return engine(x).square().mean()

    check(tmp_path, forward, make, {}, keep)
    assert len(calls) == 2 * (4 + 4)  # two trainings of four micro-batches: each once, and once more in backward


@pytest.mark.parametrize(
    ("of_transformers", "checkpointed", "keep"), each_value_once([t5, llama], [False, True], KEEPS)
)
def test_models_of_transformers(tmp_path, of_transformers, checkpointed, keep):
    """A decoder, and an encoder beside a decoder whose blocks all get what the encoder made."""
    tokens = torch.stack([row["input_ids"] for row in rows(24)]).view(6, 4, -1)

    def make():
        model = of_transformers()
        model.config.use_cache = False
        if checkpointed:
            model.gradient_checkpointing_enable()
        return model.train()

    def forward(engine, number):
        torch.manual_seed(number)  # dropout
        return engine(tokens[number], labels=tokens[number]).loss

    check(tmp_path, forward, make, {}, keep)


@GOES_ON
@pytest.mark.parametrize(
    ("failing", "keep"), each_value_once([(Op.WRITE, errno.EIO), (Op.WRITE, errno.ENOSPC), (Op.READ, errno.EIO)], KEEPS)
)
def test_a_step_whose_transfers_fail_is_dropped_and_is_right_when_it_is_done_again(
    tmp_path, monkeypatch, failing, keep
):
    """Its second micro-batch fails; the gradients of the first are dropped, too."""

    def weights(*, fails):
        config = build.section(tmp_path, accumulation=2, clip=0.5, **kept(tmp_path, keep))
        with initialize(layers(), config) as engine:

            def micro_batch(number):
                engine.backward(of_layers(engine, number))
                engine.step()

            for step in range(2):
                if fails:
                    micro_batch(2 * step)
                    with monkeypatch.context() as patch:
                        Failing(engine.activations.tier, patch, failing[0], code=failing[1])
                        with pytest.raises(SwapIOError, match="activation"):
                            micro_batch(2 * step + 1)
                for micro in range(2):
                    micro_batch(2 * step + micro)
            assert engine.activations.stats().num_kept == 0
            return {name: get_full_param(param) for name, param in engine.named_parameters()}

    assert_same_bits(weights(fails=True), weights(fails=False))
    assert list(tmp_path.iterdir()) == []


def test_a_llama_with_a_cache_says_what_to_write(tmp_path):
    tokens = rows(1)[0]["input_ids"][None]
    config = build.section(tmp_path, **kept(tmp_path, "boundaries"))
    with initialize(llama(), config) as engine, pytest.raises(TypeError, match=r"DynamicCache.*use_cache=False"):
        engine(tokens, use_cache=True)


@pytest.mark.filterwarnings("ignore:overlap_step = :UserWarning")
@pytest.mark.parametrize(("away", "keep"), each_value_once([False, True], KEEPS))
def test_boundaries_of_micro_batches_that_go_block_by_block(tmp_path, away, keep):
    """They are kept as what autograd saves is: on the drive, beyond the budget."""

    def steps(activations):
        config = build.section(tmp_path, accumulation=4, clip=0.5, bf16={"enabled": True}, **activations)
        config["micro_batch_order"] = "vertical"
        if away:
            place = {"device": "nvme", "nvme_path": str(tmp_path)}
            config["zero_optimization"]["offload_param"] = config["offload_gradients"] = place
        losses = []
        with initialize(layers(), config) as engine:
            for step in range(2):
                losses += engine.accumulate(lambda number: of_layers(engine, number), range(4 * step, 4 * step + 4))
                engine.step()
            weights = {name: get_full_param(param) for name, param in engine.named_parameters()}
            return losses, weights, engine.activations.stats() if engine.activations else None

    section = kept(tmp_path, keep)
    section["activations"]["host_budget"] = "24KiB"  # of 60
    expected, actual = steps({}), steps(section)
    assert_same_bits(actual[:2], expected[:2])
    assert actual[2].num_kept == 0
    assert actual[2].read_bytes >= 2 * 4 * 2 * 40 * 64 * 2
    assert actual[2].num_reads_foreseen > 8, "the order in which backward takes them is announced"


@pytest.mark.slow  # compilation
@pytest.mark.parametrize("keep", KEEPS)
def test_compiled_blocks(tmp_path, keep):
    torch.compiler.reset()

    def make():
        model = layers()
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return model

    check(tmp_path, of_layers, make, {}, keep)


def test_a_section_that_cannot_be_is_refused(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for keep in ("boundaries", "attention"):
        with pytest.raises(ValueError, match="no repeated layers were found in the model: name them with blocks=, or"):
            initialize(model, build.section(tmp_path, **kept(tmp_path, keep)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r'activations.nvme_path = missing: device = "nvme" needs it'):
        initialize(model, build.section(tmp_path, activations={"device": "nvme"}))
