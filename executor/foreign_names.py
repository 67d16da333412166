"""Names of settings in other trainers, and what they are called here.

From Hugging Face's TrainingArguments and TRL, LLaMA-Factory, axolotl, torchtune, litgpt, nanochat and Megatron.
"""

_ROWS = "micro_batch_size (rows)"
_STEP = "global_batch_size (rows), or tokens_per_step"
_PLANNED = "the planner's to decide; leave it out"
_ADAMW = "betas, epsilon and weight_decay: the optimizer is AdamW"
_SAVES = "save_every: a number of steps; left out, one checkpoint at the end"
_EVALUATES = "eval_every: a number of steps; left out, one evaluation at the end"

# Each reads after "unknown key '...'; here it is ".
FOREIGN_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "base_model", "checkpoint_dir", "pretrained_model_name_or_path"), "model"
    ),
    **dict.fromkeys(
        ("dataset", "datasets", "dataset_name", "dataset_path", "data_path", "train_file", "train_data",
         "train_dataset"),
        "data",
    ),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir", "logging_dir", "run_name"), "output"),
    # One step
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_gpu_train_batch_size",
            "train_micro_batch_size_per_gpu",
            "device_batch_size",
            "local_batch_size",
            "batch_size",
        ),
        _ROWS,
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_batch_size"), "micro_batch_size (rows): evaluation cuts its rows alike"
    ),
    "auto_find_batch_size": "micro_batch_size: auto",
    **dict.fromkeys(("train_batch_size", "total_batch_size", "effective_batch_size"), _STEP),
    **dict.fromkeys(
        ("grad_accumulation_steps", "gradient_accumulation", "grad_accum", "accumulate_grad_batches"),
        "gradient_accumulation_steps, which follows from tokens_per_step / (micro_batch_size x sequence_length)",
    ),
    **dict.fromkeys(
        ("cutoff_len", "max_length", "max_seq_len", "max_seq_length", "seq_len", "seq_length", "sequence_len",
         "block_size"),
        "sequence_length",
    ),
    # The optimizer and its schedule
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_decay_style"), "lr_schedule"),
    **dict.fromkeys(("warmup_iters", "num_warmup_steps", "lr_warmup_steps", "lr_warmup_iters"), "warmup_steps"),
    **dict.fromkeys(("warmup_fraction", "lr_warmup_fraction"), "warmup_ratio"),
    **dict.fromkeys(("min_lr", "cosine_min_lr_ratio", "min_lr_rate", "lr_scheduler_kwargs"), "min_lr_ratio"),
    **dict.fromkeys(("lr_decay_ratio", "decay_ratio", "num_decay_steps", "warmdown_ratio"), "wsd_decay_ratio"),
    **dict.fromkeys(("wd", "decay"), "weight_decay"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "betas, as in betas: [0.9, 0.999]"),
    **dict.fromkeys(("adam_epsilon", "adam_eps", "eps"), "epsilon"),
    **dict.fromkeys(("optim", "optimizer_name", "optim_args"), _ADAMW),
    **dict.fromkeys(("grad_clip", "clip_grad", "clip_grad_norm", "gradient_clipping", "max_norm"), "max_grad_norm"),
    "optimizer_in_bwd": "clipping: layerwise or none update inside the backward",
    **dict.fromkeys(
        ("freeze_trainable_layers", "freeze_trainable_modules", "unfrozen_parameters", "trainable_parameters"),
        "freeze, which names what is not trained, as in freeze: [model.embed_tokens.*, model.layers.0.*]",
    ),
    **dict.fromkeys(("frozen", "frozen_parameters", "freeze_layers"), "freeze, as in freeze: [model.layers.0.*]"),
    **dict.fromkeys(
        ("lora", "lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "lora_target_modules", "use_lora",
         "peft_config", "use_peft", "adapter", "finetuning_type"),
        "freeze, which leaves parameters out of training: there are no adapters",
    ),
    # How long
    **dict.fromkeys(("num_train_epochs", "epochs", "epoch"), "num_epochs"),
    **dict.fromkeys(
        ("max_iters", "train_iters", "num_iterations", "train_steps", "steps", "max_train_steps", "max_steps_per_epoch",
         "lr_decay_iters"),
        "max_steps",
    ),
    # Evaluation
    **dict.fromkeys(("eval_dataset", "eval_file", "validation_file", "test_datasets", "val_data"), "eval_data"),
    **dict.fromkeys(("val_size", "val_set_size", "validation_split_percentage"), "eval_fraction"),
    **dict.fromkeys(
        ("eval_steps", "eval_interval", "eval_strategy", "evaluation_strategy", "evals_per_epoch", "val_interval",
         "run_val_every_n_steps", "do_eval"),
        _EVALUATES,
    ),
    **dict.fromkeys(("early_stopping_patience", "early_stopping", "patience"), "early_stop_patience"),
    # The run
    **dict.fromkeys(("logging_steps", "log_interval", "log_every_n_steps", "logging_strategy"), "log_every"),
    **dict.fromkeys(
        ("report_to", "metric_logger", "logger", "log_with", "wandb_project", "use_wandb", "wandb_log"),
        "loggers, as in loggers: [tensorboard]",
    ),
    **dict.fromkeys(
        ("save_steps", "save_interval", "checkpoint_interval", "save_strategy", "saves_per_epoch", "checkpoint_every"),
        _SAVES,
    ),
    **dict.fromkeys(("save_total_limit", "max_checkpoints", "keep_last_n_checkpoints"), "keep_checkpoints"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_from", "auto_resume_from_checkpoints"), "resume"),
    **dict.fromkeys(("random_seed", "data_seed", "global_seed"), "seed"),
    # Numbers and limits
    **dict.fromkeys(
        ("bf16", "fp16", "tf32", "dtype", "torch_dtype", "mixed_precision", "pure_bf16"), "precision: bf16 or fp32"
    ),
    **dict.fromkeys(
        ("attn_implementation", "flash_attn", "flash_attention", "use_flash_attention_2"),
        "precision: it and the device decide which kernel attends",
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_bit"), "precision: quantized weights are not trained"
    ),
    **dict.fromkeys(("torch_compile", "compile", "compile_model"), "compiled"),
    **dict.fromkeys(("max_memory", "gpu_memory_limit"), "device_memory, as in device_memory: 24GiB"),
    **dict.fromkeys(
        (
            "deepspeed", "fsdp", "fsdp_config", "cpu_offload", "offload_optimizer", "offload_param", "zero_stage",
            "fsdp_cpu_offload", "enable_activation_offloading", "activation_offloading",
        ),
        _PLANNED,
    ),
    **dict.fromkeys(
        (
            "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing", "ac_mode",
            "enable_activation_checkpointing", "recompute_granularity",
        ),
        _PLANNED,
    ),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"), _PLANNED),
    # Data
    **dict.fromkeys(("template", "chat_template"), "model, whose tokenizer brings its chat template"),
    **dict.fromkeys(("sample_packing", "pack_sequences", "pack", "packed"), "packing"),
    **dict.fromkeys(("train_on_inputs", "train_on_input", "mask_prompt"), "train_on_prompt (false masks prompts)"),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), "train_on_prompt (false masks prompts)"),
    **dict.fromkeys(("column_map", "column_mapping", "field_mapping"), "columns, as in columns: {prompt: question}"),
    **dict.fromkeys(("truncation", "truncation_strategy", "excess_length_strategy"), "long_samples"),
    **dict.fromkeys(("dataset_prepared_path", "tokenized_path", "cache_dir"), "cache"),
}  # fmt: skip
