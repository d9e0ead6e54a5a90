"""Sections as people have them: every key is honoured, ignored with why, or refused with what to write."""

import json
import re
import warnings
from types import SimpleNamespace

import pytest

from nvme_offload import ConfigError, ConfigWarning, OffloadConfig

ZERO = "zero_optimization"

# Keys in the sections of DeepSpeed's own tests and examples, Hugging Face, LLaMA-Factory, axolotl and LMFlow, and those
# that DeepSpeed reads besides. Of a section that is none here, the section.
KEYS = {
    "": "zero_optimization gradient_clipping train_batch_size train_micro_batch_size_per_gpu "
    "gradient_accumulation_steps managed_gradient_accumulation bf16 bfloat16 fp16 torch_autocast amp optimizer "
    "scheduler aio communication_data_type seq_parallel_communication_data_type sequence_parallel_size "
    "prescale_gradients gradient_predivide_factor gradient_allreduce_op sparse_gradients disable_allgather "
    "activation_checkpointing autotuning checkpoint comms_logger compile compression_training csv_monitor "
    "curriculum_learning data_efficiency dataloader_drop_last dump_state eigenvalue elasticity expert_parallel "
    "flops_profiler graph_harvesting hybrid_engine log_level memory_breakdown nebula pipeline progressive_layer_drop "
    "quantize_training sparse_attention steps_per_print tensor_parallel tensorboard timers "
    "use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb comet weight_quantization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "fp16": "enabled auto_cast loss_scale loss_scale_window initial_scale_power hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "optimizer": "type params legacy_fusion",
    "optimizer.params": "lr betas eps weight_decay momentum adam_w_mode torch_adam amsgrad bias_correction "
    "fp32_optimizer_states max_grad_norm freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler "
    "local_step_scaler local_step_clipper max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold "
    "muon_lr adam_lr ns_method",
    "scheduler": "type params",
    "scheduler.params": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio "
    "cos_min_ratio last_batch_iteration cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_min_lr cycle_max_lr decay_lr_rate cycle_min_mom cycle_max_mom "
    "decay_mom_rate lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "zero_optimization": "stage aio contiguous_gradients reduce_scatter reduce_bucket_size "
    "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights "
    "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param "
    "cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size param_persistence_threshold "
    "model_persistence_threshold max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save "
    "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential stage3_prefetch_bucket_size "
    "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
    "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights "
    "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size "
    "mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
}
ALL_KEYS = [f"{home}.{name}" if home else name for home, names in KEYS.items() for name in names.split()]


def problems_of(data):
    with warnings.catch_warnings(action="ignore"), pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(data)
    return list(caught.value.problems)


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", ALL_KEYS)
def test_no_key_of_deepspeed_gets_the_nearest_spelling(key):
    with warnings.catch_warnings(action="ignore"):
        told = ""
        try:
            OffloadConfig.from_dict(nested(key, 0.5))
        except ConfigError as error:
            told = str(error)
    assert "nearest" not in told
    assert "unknown" not in told


@pytest.mark.parametrize(("section", "advice"), [
    ({"compile": {"deepcompile": True}}, "call torch.compile on the model"),
    ({"tensor_parallel": {"autotp_size": 2}}, "a mesh with a dimension 'tp'"),
    ({"hybrid_engine": {"enabled": True}}, "generate with engine.module"),
    ({"expert_parallel": {"enabled": True}}, "no expert parallelism"),
    ({"sequence_parallel_size": 2}, "no sequence parallelism"),
    ({"managed_gradient_accumulation": False}, "engine.set_gradient_accumulation_boundary()"),
    ({"compression_training": {"layer_reduction": {"enabled": True}}}, "change the model itself"),
    ({"optimizer": {"type": "OneBitAdam"}}, "initialize(optimizer=...)"),
    ({"optimizer": {"type": "Adam", "params": {"freeze_step": 2}}}, "choose another type"),
    ({"scheduler": {"type": "OneCycle"}}, "initialize(lr_scheduler=...)"),
    ({"scheduler": {"params": {"cycle_min_lr": 0.1}}}, "torch's OneCycleLR"),
    ({ZERO: {"zero_hpz_partition_size": 8}}, "dp_replicate and dp_shard"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_what_is_not_done_here_has_advice_of_its_own(section, advice):
    [problem] = problems_of(section)
    assert advice in problem


@pytest.mark.parametrize("section", [
    {"compile": {"disable": False, "backend": "inductor"}}, {"tensor_parallel": {"autotp_size": 1}},
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
    {"compression_training": {"enabled": False, "inner": {"enabled": True}}},
    {"amp": {"enabled": "auto", "opt_level": "auto"}}, {"prescale_gradients": True},
    {"activation_checkpointing": {"cpu_checkpointing": True}}, {"fp16": {"auto_cast": True, "opt_level": "O2"}},
    {"bf16": {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}},
    {"_comment": "for two nodes", "//": "", "log": "debug", "cuda_visible_devices": "0,1", "xyzzy": {"a": 1}},
    {"checkpoint-activations": True, "warmup": 0.01, "zero_force_ds_cpu_optimization": False},
    {ZERO: {"max_live_parameters": 1e9, "max_reuse_distance": 1e9, "gather_16bit_weights_on_model_save": True}},
    {ZERO: {"prefetch_bucket_size": "auto", "param_persistence_threshold": "auto", "reduce_bucket_size": "auto"}},
], ids=lambda section: "-".join(section))  # fmt: skip
def test_what_has_no_meaning_here_is_one_warning(section):
    with pytest.warns(ConfigWarning, match="accepted, but without effect here") as caught:
        assert OffloadConfig.from_dict(section) == OffloadConfig()
    assert len(caught) == 1


@pytest.mark.parametrize("home", [f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", "offload_gradients"])
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_path_that_nothing_uses_is_told_and_forgotten(home, device):
    section = nested(home, {"device": device, "nvme_path": "/local_nvme"})
    with pytest.warns(ConfigWarning) as caught:
        config = OffloadConfig.from_dict(section)
    assert config == OffloadConfig.from_dict(nested(home, {"device": device}))
    expected = f'{home}.nvme_path = "/local_nvme": device = "{device}", and only "nvme" uses it'
    assert [str(warning.message).splitlines()[1].strip() for warning in caught] == [expected]


BF16, AIO, CPU = {"bf16": {"enabled": True}}, {"block_size": 262144, "queue_depth": 16}, {"device": "cpu"}
IN_FP32 = {"gradient_accumulation_dtype": "fp32"}


@pytest.mark.parametrize(("written", "read", "told"), [
    ({ZERO: {"stage": "2"}, "bf16": {"enabled": "true"}}, {ZERO: {"stage": 2}, "bf16": {"enabled": True}}, ""),
    ({"fp16": {"enabled": "yes", "hysteresis": "3"}}, {"fp16": {"enabled": True, "hysteresis": 3}}, ""),
    ({ZERO: False}, {}, "an old spelling of stage 0"),
    ({ZERO: True}, {ZERO: {"stage": 1}}, "an old spelling of stage 1"),
    ({"scheduler": {"params": {"warmup_type": "cosine"}}}, {"scheduler": {"params": {"warmup_type": "log"}}},
     'takes "log" as well'),
    ({"find_unused_parameters": True}, {}, "find_unused_parameters = true: nobody knows it"),
    ({"checkpoint": {"tag_validation_enabled": True}}, {}, "checkpoint.tag_validation_enabled = true: nobody"),
    ({"aio": {"enabled": False}}, {}, "aio.enabled = false: DeepSpeed does not read it either"),
    ({ZERO: {"stage": 2, "cpu_offload": True}}, {ZERO: {"stage": 2, "offload_optimizer": CPU}}, ""),
    ({ZERO: {"stage": 2, "cpu_offload_param": True}}, {ZERO: {"stage": 2, "offload_param": CPU}}, ""),
    ({ZERO: {"cpu_offload": False}}, {}, "zero_optimization.cpu_offload = false"),
    ({ZERO: {"cpu_offload_param": False}}, {}, "zero_optimization.cpu_offload_param = false"),
    ({ZERO: {"stage": 3, "aio": AIO}}, {ZERO: {"stage": 3}, "aio": AIO}, ""),  # where Hugging Face has it
    ({"aio": None, ZERO: {"offload_optimizer": None}, "data_types": None}, {}, ""), ({"data_types": {}}, {}, ""),
    (IN_FP32 | {"data_types": {"grad_accum_dtype": "fp32"}}, IN_FP32, ""), ({"deepspeed": BF16}, BF16, ""),
    ({"bfloat16": {"enabled": True}}, BF16, ""), ({"bfloat16": {"enabled": True}} | BF16, BF16, ""),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_spellings_are_read_as_deepspeed_reads_them(written, read, told):
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert OffloadConfig.from_dict(written) == OffloadConfig.from_dict(read)
    assert not told or any(told in str(warning.message) for warning in caught)


def test_zeros_that_deepspeed_takes():
    config = OffloadConfig.from_dict({ZERO: {"sub_group_size": 0}, "fp16": {"min_loss_scale": 0}})
    assert config.zero_optimization.sub_group_size == OffloadConfig().zero_optimization.sub_group_size
    assert config.fp16.min_loss_scale == 0


def test_aio_where_hugging_face_has_it_is_checked_as_elsewhere():
    [problem] = problems_of({ZERO: {"aio": AIO}, "aio": {"queue_depth": 8}})
    assert problem.endswith("is another spelling of it; keep aio")
    [problem] = problems_of({ZERO: {"aio": {"queue_dept": 8}}})
    assert problem.startswith("zero_optimization.aio.queue_dept = 8: unknown key")


def test_contradictions_of_all_sections_are_told_at_once_beside_other_errors():
    section = {
        "aio": {"path_weights": [1, 2], "queue_depth": 0},
        "bf16": {"enabled": True},
        "fp16": {"enabled": True, "min_loss_scale": 8, "initial_scale_power": 2},
        "torch_autocast": {"enabled": True},
        "gradient_accumulation_dtype": "fp16",
        "optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99], "eps": 1e-8}},
        "scheduler": {"type": "WarmupDecayLR"},
        "tensor_parallel": {"autotp_size": 4},
        ZERO: {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    }
    assert {problem.split(" = ")[0] for problem in problems_of(section)} == {
        *("aio.path_weights", "aio.queue_depth", "fp16.min_loss_scale", "gradient_accumulation_dtype"),
        *("optimizer.params.betas", "optimizer.params.eps", "tensor_parallel", "torch_autocast.enabled"),
        *("torch_autocast.dtype", "scheduler.params.total_num_steps", "scheduler.params.warmup_max_lr"),
        *(f"{ZERO}.offload_optimizer.nvme_path", f"{ZERO}.offload_param.nvme_path"),
    }


@pytest.mark.parametrize("section", [
    {ZERO: {"offload_optimizer": {"device": "disk", "nvme_path": "/d"}}, "aio": {"path_weights": [1]}},
    {ZERO: {"offload_optimizer": {"device": "nvme", "nvme_path": 7}}, "aio": {"path_weights": [1, 2]}},
    {"optimizer": {"type": "Lamb", "params": {"momentum": 0.9}}},
    {"bf16": {"enabled": 2}, "gradient_accumulation_dtype": "bf16", "fp32_modules": ["norm"]},
], ids=["device", "path", "type", "mode"])  # fmt: skip
def test_what_a_wrong_value_would_contradict_is_not_told(section):
    assert len(problems_of(section)) == 1


AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupDecayLR",
     "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")},
    ZERO: {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip


ARGUMENTS = {
    "world_size": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "max_grad_norm": 0.7,
    "learning_rate": 2e-5, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.01,
    "fp16": False, "fp16_full_eval": False, "bf16": True, "bf16_full_eval": False, "max_steps": -1,
    "get_warmup_steps": lambda num_training_steps: num_training_steps // 10,
}  # fmt: skip
"""The arguments that are read of ``transformers.TrainingArguments``."""


def arguments(**more):
    return SimpleNamespace(**ARGUMENTS | more)


def resolved(section, args, steps=100):
    with warnings.catch_warnings(action="ignore"):
        return OffloadConfig.from_training_arguments(section, args, steps)


def test_auto_that_nobody_resolves_is_the_default_and_one_warning_names_it():
    section = {key: value for key, value in AUTO.items() if key != "scheduler"}
    with pytest.warns(ConfigWarning) as caught:
        config = OffloadConfig.from_dict(section)
    assert config == OffloadConfig.from_dict({ZERO: {"stage": 3}})
    [warning] = caught
    assert warning.filename == __file__
    _, _, told = str(warning.message).partition('"auto", and nobody to resolve it, so the default')
    assert set(re.findall(r"(?m)^  ([\w.]+): ", told)) == {
        *("fp16.enabled", "bf16.enabled", "gradient_accumulation_steps", "gradient_clipping"),
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *("train_batch_size", "train_micro_batch_size_per_gpu"),
    }
    assert "  gradient_clipping: 0.0" in told


def test_auto_that_has_no_default_is_refused_and_says_who_resolves_it():
    assert [problem.split(": ")[0] for problem in problems_of(AUTO)] == [
        'scheduler.params.total_num_steps = "auto"',
        'scheduler.params.warmup_max_lr = "auto"',
    ]
    assert all("OffloadConfig.from_training_arguments" in problem for problem in problems_of(AUTO))


@pytest.mark.parametrize("wrapped", [False, True])
def test_auto_is_resolved_from_training_arguments(tmp_path, wrapped):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"deepspeed": AUTO} if wrapped else AUTO))
    before = json.dumps(AUTO)
    config = resolved(AUTO, arguments())
    assert json.dumps(AUTO) == before
    assert resolved(path, arguments()) == config
    assert config.batch_sizes(2) == (24, 3, 4)
    assert (config.compute_dtype, config.gradient_clipping) == ("bf16", 0.7)
    expected = {"lr": 2e-5, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.01}
    expected |= {"state_dtype": "fp32", "bias_correction": True}
    assert config.optimizer.hyperparameters == expected
    schedule = config.scheduler.params
    assert (schedule.warmup_min_lr, schedule.warmup_max_lr) == (0, 2e-5)
    assert (schedule.warmup_num_steps, schedule.total_num_steps) == (10, 100)
    assert resolved(AUTO, arguments(max_steps=50), None).scheduler.params.total_num_steps == 50
    assert resolved({}, arguments()).optimizer.hyperparameters == expected, "as Trainer makes it"


def test_what_the_arguments_contradict_is_refused_with_all_else():
    section = {**AUTO, "gradient_clipping": 1.0, "optimizer": {"params": {"lr": 0.1, "eps": "auto"}}, "aio": {"x": 1}}
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_training_arguments(section, arguments())
    problems = {problem.split(" = ")[0]: problem for problem in caught.value.problems}
    steps = {f"scheduler.params.{name}" for name in ("warmup_num_steps", "total_num_steps")}
    assert set(problems) == {"gradient_clipping", "optimizer.params.lr", "aio.x", *steps}
    assert 'args.max_grad_norm is 0.7; write "auto"' in problems["gradient_clipping"]
    assert "pass num_training_steps=" in problems["scheduler.params.warmup_num_steps"]
    with pytest.raises(ConfigError, match=r"SimpleNamespace: .*per_device_train_batch_size.*TrainingArguments"):
        OffloadConfig.from_training_arguments(AUTO, SimpleNamespace())


@pytest.mark.parametrize("more", [{"bf16": True}, {"bf16": False, "weight_decay": 0.1, "warmup_steps": 7}])
def test_transformers_resolves_to_the_same(tmp_path, more):
    transformers = pytest.importorskip("transformers")
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Config(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
        def __init__(self, section):  # without deepspeed itself, which is only asked for its version
            HfDeepSpeedConfig.__init__(self, section)
            self.mismatches = []

    given = {"use_cpu": True, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "learning_rate": 3e-5}
    given |= {"adam_beta2": 0.98, "max_grad_norm": 0.5, **more}
    args = transformers.TrainingArguments(output_dir=str(tmp_path), **given)
    theirs = Config(json.loads(json.dumps(AUTO)))
    theirs.trainer_config_process(args)
    theirs.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 200)
    with warnings.catch_warnings(action="ignore"):
        assert OffloadConfig.from_dict(theirs.config) == OffloadConfig.from_training_arguments(AUTO, args, 200)
    assert theirs.config["optimizer"]["params"]["lr"] == 3e-5
