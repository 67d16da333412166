"""Names of settings in other trainers, and what they are called here."""

_ROWS = "micro_batch_size (rows)"
_TOKENS = "tokens_per_step (rows of all micro-batches x sequence_length)"
_PLANNED = "the planner's to decide; leave it out"

# Each reads after "unknown key '...'; here it is ".
FOREIGN_NAMES: dict[str, str] = {
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "checkpoint_dir"), "model"),
    **dict.fromkeys(("dataset", "datasets", "data_path", "train_file", "train_data"), "data"),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir"), "output"),
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "train_micro_batch_size_per_gpu",
            "device_batch_size",
            "local_batch_size",
            "batch_size",
        ),
        _ROWS,
    ),
    **dict.fromkeys(("global_batch_size", "train_batch_size", "total_batch_size"), _TOKENS),
    "gradient_accumulation_steps": "derived: tokens_per_step / (micro_batch_size x sequence_length)",
    **dict.fromkeys(
        ("cutoff_len", "max_length", "max_seq_len", "max_seq_length", "seq_len", "sequence_len", "block_size"),
        "sequence_length",
    ),
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), "lr_schedule"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs", "epoch"), "max_steps (left out: one epoch)"),
    **dict.fromkeys(("max_iters", "train_iters", "num_iterations", "train_steps", "steps"), "max_steps"),
    **dict.fromkeys(("warmup_ratio", "warmup_iters", "num_warmup_steps", "lr_warmup_steps"), "warmup_steps"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "betas, as in betas: [0.9, 0.999]"),
    **dict.fromkeys(("adam_epsilon", "adam_eps", "eps"), "epsilon"),
    **dict.fromkeys(("grad_clip", "clip_grad", "clip_grad_norm", "gradient_clipping", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("logging_steps", "log_interval", "log_every_n_steps"), "log_every"),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_interval"), "save_every"),
    **dict.fromkeys(("save_total_limit", "max_checkpoints"), "keep_checkpoints"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_from"), "resume"),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype", "mixed_precision"), "precision: bf16 or fp32"),
    **dict.fromkeys(("torch_compile", "compile"), "compiled"),
    **dict.fromkeys(("deepspeed", "fsdp", "cpu_offload", "offload_optimizer", "offload_param"), _PLANNED),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "ac_mode"), _PLANNED),
    # Data
    **dict.fromkeys(("sample_packing", "pack_sequences", "pack", "packed"), "packing"),
    **dict.fromkeys(("train_on_inputs", "train_on_input", "mask_prompt"), "train_on_prompt (false masks prompts)"),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), "train_on_prompt (false masks prompts)"),
    **dict.fromkeys(("column_map", "column_mapping", "field_mapping"), "columns, as in columns: {prompt: question}"),
    **dict.fromkeys(("truncation", "truncation_strategy", "excess_length_strategy"), "long_samples"),
    **dict.fromkeys(("dataset_prepared_path", "tokenized_path", "cache_dir"), "cache"),
}
