"""Keys of DeepSpeed's that are no fields here, of the top level and of `zero_optimization`, and what is said of each.

The other sections have theirs in their models. What the tables mean: `offload.config.keys.Section`.
"""

from .keys import each

_NO_PRINTING = "nothing is printed per step; the optimizer's stats() has the figures"
_NO_LOGGING = "nothing is logged or profiled from here; torch.profiler and the training loop can"
_PYTORCH_COMMUNICATES = "PyTorch does the communication and chooses its own buckets and overlap"
_PYTORCH_GATHERS = "PyTorch (FSDP2) gathers and frees parameters module by module; blocks= of initialize says which"
_HYBRID = "give initialize a mesh with the dimensions dp_replicate and dp_shard for this"
_OWN_ENGINE = "it steers DeepSpeed's own engine"

TOP_IGNORED = {
    **each("steps_per_print wall_clock_breakdown memory_breakdown dump_state timers log_level", _NO_PRINTING),
    **each("comms_logger flops_profiler tensorboard wandb csv_monitor comet", _NO_LOGGING),
    **each("dataloader_drop_last vocabulary_size", "the training loop brings its own data"),
    "zero_allow_untested_optimizer": "there is no list of tested optimizers",
    "zero_force_ds_cpu_optimizer": "the update is always this package's own kernel",
    **each("prescale_gradients gradient_predivide_factor", "gradients are averaged over ranks; PyTorch chooses how"),
    "disable_allgather": _PYTORCH_COMMUNICATES,
    "pipeline": "a pipeline is a dimension 'pp' of the mesh, and torch.distributed.pipelining schedules it",
    "nebula": "checkpoints are written by this process, into the folder that save_checkpoint gets",
    "graph_harvesting": "no CUDA graphs are recorded here",
    "seq_parallel_communication_data_type": "there is no sequence parallelism here",
    "activation_checkpointing": "only deepspeed.checkpointing reads it, which a model calls itself; call "
    "torch.utils.checkpoint there or, of a Hugging Face model, gradient_checkpointing_enable()",
    **each(
        "monitor_config comms_config log cuda_visible_devices comment _comment //", "DeepSpeed does not read it either"
    ),
    "use_data_before_expert_parallelism": "the mesh that initialize gets has the order of ranks",
}
TOP_ONLY = {
    "amp": ({"enabled": False}, "there is no Apex; enable bf16, fp16 or torch_autocast"),
    "autotuning": ({"enabled": False}, "nothing is tuned by trial runs; `offload plan` says how long a step will take"),
    "elasticity": ({"enabled": False}, "a run keeps its ranks, and a checkpoint loads on others; write the batch keys"),
    **each(
        "curriculum_learning data_efficiency eigenvalue progressive_layer_drop",
        ({"enabled": False}, "what is trained, and on what, is up to the training loop"),
    ),
    **each(
        "compression_training quantize_training weight_quantization",
        ({"enabled": False}, "it changes what is computed; change the model itself"),
    ),
    "compile": (
        {"deepcompile": False},
        "nothing is compiled here; call torch.compile on the model, or on its blocks, before initialize",
    ),
    "tensor_parallel": (
        {"autotp_size": 1},
        "parallelize the model with torch's parallelize_module, and give initialize a mesh with a dimension 'tp'",
    ),
    "hybrid_engine": ({"enabled": False}, "there is no engine for inference; generate with engine.module"),
    "expert_parallel": ({"enabled": False}, "there is no expert parallelism; the experts are sharded as all else is"),
    "sequence_parallel_size": (1, "there is no sequence parallelism here"),
    "managed_gradient_accumulation": (
        True,
        "the engine counts micro-batches; call engine.set_gradient_accumulation_boundary() where the loop does",
    ),
    "sparse_gradients": (False, "there are no sparse gradients; make the embedding with sparse=False"),
    "gradient_allreduce_op": ("mean", "gradients are averaged over ranks; multiply the loss for their sum"),
}
TOP_REFUSED = {
    "sparse_attention": "it changes what is computed; change the model itself and leave it out",
    **each("data_types.param_dtype data_types.buffer_dtype", "bf16 and fp16 decide this; leave it out"),
    "deepspeed": "it holds the whole section only where it stands alone; move the keys beside it into it",
}

ZERO_IGNORED = {
    **each(
        "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size round_robin_gradients "
        "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size "
        "stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params "
        "allgather_sequential use_all_reduce_for_fetch_params",
        _PYTORCH_COMMUNICATES,
    ),
    **each(
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold stage3_partition_stream_chunk_size "
        "max_live_parameters max_reuse_distance prefetch_bucket_size param_persistence_threshold "
        "model_persistence_threshold module_granularity_threshold leaf_module",
        _PYTORCH_GATHERS,
    ),
    **each(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save",
        "the model's state dict is PyTorch's own; engine.save_16bit_model() writes the whole weights",
    ),
    **each(
        "load_from_fp32_weights ignore_unused_parameters find_unused_parameters memory_efficient_linear "
        "override_module_apply elastic_checkpoint legacy_stage1 log_trace_cache_warnings enable_sanity_checks "
        "pipeline_loading_checkpoint",
        _OWN_ENGINE,
    ),
    "cpu_offload": '`true` is read as "offload_optimizer": {"device": "cpu"}, of which it is the old spelling',
    "cpu_offload_param": '`true` is read as "offload_param": {"device": "cpu"}, of which it is the old spelling',
}
ZERO_ONLY = {
    **each("zero_quantized_weights zero_quantized_nontrainable_weights", (False, "gathered weights are exact")),
    "zero_quantized_gradients": (False, "reduced gradients are exact"),
    "zeropp_loco_param": (None, "reduced gradients are exact"),
    "zero_hpz_partition_size": (1, _HYBRID),
    "mics_shard_size": (-1, _HYBRID),
    "mics_hierarchical_params_gather": (False, "PyTorch gathers parameters in one collective"),
    "save_muon_momentum_buffer_in_memory": (False, "the whole state is on the tier that offload_optimizer names"),
}
ZERO_TRANSLATED = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
}
ZERO_REFUSED = {
    "cpu_offload_use_pin_memory": "the old spelling; write offload_optimizer.pin_memory",
    "zenflow": "it changes the result of a step; leave it out",
}
