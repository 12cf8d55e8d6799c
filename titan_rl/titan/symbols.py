"""Every name of TorchTitan and vLLM that titan_rl relies on, and what for.

A test checks that each exists, that these tables and the imports of the package agree, and that those which
titan_rl replaces or overrides still behave as it assumes. ``docs/symbols.md`` is made from here. Tables
are module -> name -> purpose; a leading underscore means private to its library. Standard library only.
"""

TORCHTITAN_IMPORTS = {
    "torchtitan.components.checkpointer": {
        "CheckpointManager": "Checkpoints of the run, by DCP.",
    },
    "torchtitan.components.dataloader": {
        "BaseDataLoader": "Base of the data loaders: none in RL, prompts with answers in supervised runs.",
    },
    "torchtitan.components.loss": {
        "CrossEntropyLoss": "Loss of supervised runs.",
        "IGNORE_INDEX": "Label of tokens that are not trained in supervised runs.",
    },
    "torchtitan.components.lora": {
        "LoRAConverter": "`[lora]`: adapters; `_lora_scaling` of its layers is SET to 0 to switch them off.",
    },
    "torchtitan.components.metrics": {
        "MetricsProcessor": "Bounds of `metrics.*` keys in the schema.",
    },
    "torchtitan.components.optimizer": {
        "LRSchedulersContainer": "The critic's schedule, and its configuration.",
        "OptimizersContainer": "The optimiser's configuration, which `[optimizer]` becomes.",
        "ParamGroupConfig": "The one parameter group that `[optimizer]` describes.",
        "register_moe_load_balancing_hook": "Moves the routers' biases before each optimiser step.",
    },
    "torchtitan.components.validate": {
        "Validator": "Base of the validation on held-out documents in supervised runs.",
    },
    "torchtitan.config.configs": {
        "CommConfig": "Bounds of `comm.*` keys in the schema.",
        "TrainingConfig": "Bounds of `training.*` keys in the schema.",
    },
    "torchtitan.config": {
        "TORCH_DTYPE_MAP": "From a dtype's name to the dtype.",
    },
    "torchtitan.distributed.activation_checkpoint": {
        "FullAC": "`activation_checkpoint.type = 'full'`.",
        "MemoryBudgetAC": "`activation_checkpoint.type = 'memory_budget'`.",
        "SelectiveAC": "`activation_checkpoint.type = 'selective'`, the default.",
    },
    "torchtitan.distributed.context_parallel": {
        "prepare_context_parallel_input": "This rank's tokens of a micro-batch, and the mask of them.",
    },
    "torchtitan.distributed.pipeline_parallel": {
        "pipeline_llm": "Part of every model spec: cuts a model into stages.",
    },
    "torchtitan.distributed.spmd_types": {
        "annotate_input_spmd_types": "Annotates a micro-batch as TorchTitan's trainer does.",
    },
    "torchtitan.distributed.utils": {
        "clip_grad_norm_": "Clips and returns the global gradient norm.",
        "dist_sum": "Sums of the validation over ranks.",
        "get_spmd_context": "TorchTitan's context of a forward pass, for a check without its trainer.",
        "get_spmd_backend": "Restored after a plan or a check, which set another.",
        "init_fake_mode": "The process group of a plan: ranks that do not exist.",
        "set_pg_timeouts": "Lets a rank wait for the slowest one's rollouts.",
        "set_spmd_backend": "How the model of a plan or a check is sharded.",
    },
    "torchtitan.distributed": {
        "utils": "Module in which the clipping is replaced during a supervised step.",
        "ParallelDims": "Finds the data-parallel ranks; the mesh of a plan and of a check.",
        "fsdp": "Module in which the gradient division is replaced on a CPU.",
    },
    "torchtitan.models.common.attention": {
        "FlexAttention": "Base of the attention that replaces it on a CPU; takes masks.",
        "FusedQKVLinear": "Recognised where `[lora]` cannot adapt queries, keys and values.",
        "ScaledDotProductAttention": "Recognised by the local generator as causal.",
        "VarlenAttention": "Recognised by the local generator when it has no window; takes masks.",
    },
    "torchtitan.models.common.config_utils": {
        "get_attention_config": "Attention by its name in `model.attn_backend`.",
        "make_ffn_config": "Feed-forward layers of a model built from `config.json`.",
        "make_gqa_config": "Attention layers of a model built from `config.json`.",
        "make_moe_config": "Mixtures of experts of a Qwen3-MoE directory.",
        "make_routed_experts_config": "Their experts and how tokens get there.",
        "make_router_config": "Their routers.",
    },
    "torchtitan.models.common.decoder": {
        "Decoder": "The models that the local generator can run; its masks are those that know branches.",
    },
    "torchtitan.models.common.decoder_sharding": {
        "dense_activation_placement": "Layout of a value head's input and output.",
        "dense_param_placement": "Layout of a value head's weight and bias.",
    },
    "torchtitan.models.common.feed_forward": {
        "FeedForward": "Type of the feed-forward layers.",
    },
    "torchtitan.models.common.moe": {
        "GroupedExperts": "Base of the experts that replace it on a CPU.",
        "MoE": "Type of the mixtures of experts.",
    },
    "torchtitan.models.common.token_dispatcher": {
        "AllToAllTokenDispatcher": "Base of the dispatch that replaces it on a CPU.",
    },
    "torchtitan.models.common.nn_modules": {
        "RMSNorm": "Norms of a model built from `config.json`.",
    },
    "torchtitan.models.common.param_init": {
        "skip_param_init": "Marks the embedding that is tied to the head.",
    },
    "torchtitan.models.common": {
        "ComplexRoPE": "Llama's rotary embedding.",
        "CosSinRoPE": "Qwen3's rotary embedding.",
        "Embedding": "Embedding of a model built from `config.json`.",
        "Linear": "Head of a model built from `config.json`, and base of a value model's.",
        "RoPE": "Common type of the rotary embeddings.",
        "attention": "Module in which masks are made without a compiler on a CPU.",
        "decoder": "Module whose decoder gets document spans for masks on a CPU.",
    },
    "torchtitan.models.deepseek_v3": {
        "MTPDecoder": "The local generator runs it where it has no layers for further tokens.",
    },
    "torchtitan.models.llama3.model": {
        "Llama3Model": "The Llama model.",
        "Llama3TransformerBlock": "A Llama layer.",
    },
    "torchtitan.models.llama3.state_dict_adapter": {
        "Llama3StateDictAdapter": "Names and layout of Llama weights in Hugging Face files.",
    },
    "torchtitan.models.llama3": {
        "parallelize_llama": "Shards the Llama model.",
    },
    "torchtitan.models.qwen3.model": {
        "Qwen3Model": "The Qwen3 model.",
        "Qwen3TransformerBlock": "A Qwen3 layer.",
    },
    "torchtitan.models.qwen3.state_dict_adapter": {
        "Qwen3StateDictAdapter": "Names of Qwen3 weights in Hugging Face files.",
    },
    "torchtitan.models.qwen3": {
        "parallelize_qwen3": "Shards the Qwen3 model.",
    },
    "torchtitan.models": {
        "_supported_models": "Names that `model.name` may take besides a module of the user's.",
    },
    "torchtitan.protocols.model": {
        "BaseModel": "Type of models and of their configurations.",
    },
    "torchtitan.protocols.model_spec": {
        "ModelSpec": "A model, how it is sharded, and its state-dict adapter.",
    },
    "torchtitan.protocols.sharding": {
        "ShardingConfig": "A value head's under tensor parallelism: one row cannot be cut.",
    },
    "torchtitan.protocols.state_dict_adapter": {
        "BaseStateDictAdapter": "Type of the state-dict adapters.",
    },
    "torchtitan.protocols.module": {
        "Module": "Whose configurations LoRA's converter replaced, when they are restored.",
    },
    "torchtitan.protocols": {
        "module": "Module whose initialisation of sharded parameters is replaced on a CPU.",
    },
    "torchtitan.tools.logging": {
        "init_logger": "Sets logging up before the trainer does.",
        "logger": "The log of a run.",
    },
    "torchtitan.tools.profiler": {
        "Profiler": "Its configuration's callable is hidden from TOML.",
    },
    "torchtitan.tools": {
        "utils": "Module that holds the device type and the device module.",
    },
    "torchtitan.trainer": {
        "Trainer": "Base of both trainers.",
    },
}
"""What is imported, in ``titan_rl/titan/`` alone."""

TORCHTITAN_REACHED = {
    "torch.distributed.tensor.experimental._context_parallel._attention": {
        "_compiled_create_block_mask": "REPLACED on a CPU: masks of context parallelism without a compiler.",
    },
    "torch.distributed.pipelining.schedules": {
        "_PipelineSchedule._loss_fn": "SET for each step: the loss of its micro-batches.",
        "_PipelineSchedule._n_microbatches": "Micro-batches of one run; a step is filled up to a multiple.",
        "_PipelineSchedule.step": "Runs one multiple, on every pipeline rank.",
    },
    "torchtitan.components.checkpointer": {
        "CheckpointManager._create_checkpoint_id": "OVERRIDDEN: it is written aside until it is complete.",
        "CheckpointManager._find_load_step": "OVERRIDDEN: the newest checkpoint whose manifest holds.",
        "CheckpointManager._load": "OVERRIDDEN: a damaged checkpoint that is asked for is an error.",
        "CheckpointManager._purge_stale_checkpoints": "OVERRIDDEN: retention follows a complete checkpoint.",
        "CheckpointManager._save": "OVERRIDDEN: hashes, manifest, name; failures are counted.",
        "CheckpointManager._should_save": "OVERRIDDEN: also when a checkpoint is asked for.",
        "CheckpointManager._wait_for_saving": "OVERRIDDEN: a failure in the background is counted.",
        "CheckpointManager.dcp_load": "OVERRIDDEN: nothing in a checkpoint is run.",
        "CheckpointManager.dcp_save": "OVERRIDDEN: an asynchronous save takes little from training.",
        "CheckpointManager.enable": "Whether there are checkpoints.",
        "CheckpointManager.folder": "Where they lie.",
        "CheckpointManager.initial_load_path": "SET to None where it is loaded before: reward models, LoRA.",
        "CheckpointManager.keep_latest_k": "How many of the latest stay.",
        "CheckpointManager.last_save_model_only": "Whether the last one can be resumed from.",
        "CheckpointManager.load": "Restores the newest checkpoint of the run.",
        "CheckpointManager.load_only": "Whether nothing is saved.",
        "CheckpointManager.maybe_wait_for_saving": "Before the next checkpoint.",
        "CheckpointManager.maybe_wait_for_staging": "Before weights change under an asynchronous save.",
        "CheckpointManager.purge_queue": "Deletes in the background.",
        "CheckpointManager.purge_thread": "Whether it does.",
        "CheckpointManager.save": "At the end of an iteration.",
        "CheckpointManager.save_future": "SET: an asynchronous save ends when its checkpoint is complete.",
        "CheckpointManager.states": "`rl_state` is added to it; read when saving and loading.",
    },
    "torchtitan.components.metrics": {
        "MetricsProcessor.logger": "Writes metrics to TensorBoard and W&B.",
        "MetricsProcessor.should_log": "Applies `metrics.log_freq`.",
    },
    "torchtitan.distributed.utils": {
        "clip_grad_norm_": "REPLACED during a supervised step: the norm is judged first.",
    },
    "torchtitan.distributed.fsdp": {
        "disable_fsdp_gradient_division": "REPLACED on a CPU: gloo cannot scale while it sums.",
    },
    "torchtitan.distributed": {
        "ParallelDims.cp": "Context-parallel ranks, which train on the same rows.",
        "ParallelDims.ep_enabled": "How the gradient norm is summed.",
        "ParallelDims.get_mesh": "The mesh `batch` of data-parallel ranks.",
        "ParallelDims.get_optional_mesh": "The ranks of a pipeline, of tensor and of context parallelism.",
        "ParallelDims.pp": "Pipeline ranks, which train on the same rows.",
        "ParallelDims.pp_enabled": "Whether a model is built in stages.",
        "ParallelDims.tp": "Tensor-parallel ranks, which train on the same rows.",
    },
    "torchtitan.models.common.attention": {
        "FlexAttention.forward": "OVERRIDDEN on a CPU: attention per document.",
        "_compiled_create_block_mask": "REPLACED on a CPU: masks without a C++ compiler.",
    },
    "torchtitan.models.common.decoder": {
        "Decoder._create_flex_attention_mask_for_document": "REPLACED: masks know branches; on a CPU, spans.",
        "Decoder._create_flex_attention_mask": "Makes the mask of rows that share prompts.",
        "Decoder.Config.first_attention": "Whether the model takes masks.",
        "Decoder._skip_lm_head": "SET: the policy returns hidden states; the head runs on trained tokens.",
        "Decoder.enable_weight_tying": "Whether the head is the embedding.",
        "Decoder.get_attention_masks": "Masks of a micro-batch; the local generator refuses other ones.",
        "Decoder.layers": "Walked layer by layer when weights stream.",
        "Decoder.lm_head": "Its weight is the output projection of the chunked log-probabilities.",
    },
    "torchtitan.models.common.moe": {
        "GroupedExperts.forward": "OVERRIDDEN on a CPU: one product per expert, in the model's precision.",
        "MoE.load_balance_coeff": "SET by `model.load_balance_coeff`.",
        "MoE.router": "A hook on it counts the experts that it chose.",
        "MoE.tokens_per_expert_E": "SET before each optimiser step to the counts of real tokens.",
    },
    "torchtitan.models.common.token_dispatcher": {
        "AllToAllTokenDispatcher._combine_token_exchange": "OVERRIDDEN on a CPU: gloo's all-to-all.",
        "AllToAllTokenDispatcher._dispatch_token_exchange": "OVERRIDDEN on a CPU: gloo's all-to-all.",
        "AllToAllTokenDispatcher._token_count_exchange": "OVERRIDDEN on a CPU: gloo's all-to-all.",
    },
    "torchtitan.models.llama3.state_dict_adapter": {
        "Llama3StateDictAdapter.from_hf_map": "Which name becomes which.",
    },
    "torchtitan.models.qwen3.state_dict_adapter": {
        "Qwen3StateDictAdapter.from_hf_map": "Which name becomes which; the router's bias is added to it.",
    },
    "torchtitan.protocols.model": {
        "BaseModel.init_weights": "Initialises the reference and the local generator's model.",
    },
    "torchtitan.protocols.model_spec": {
        "ModelSpec.parallelize_fn": "Shards reference, critic, reward model and teacher like the policy.",
        "ModelSpec.pipelining_fn": "Cuts them into the policy's stages.",
    },
    "torchtitan.protocols.module": {
        "Module._init_self_parameters": "REPLACED on a CPU: shards of one whole draw.",
        "Module._sharding_config": "SET for a value head before it is parallelised.",
        "Module.parallelize": "OVERRIDDEN for a value head: replicated under tensor parallelism.",
    },
    "torchtitan.protocols.state_dict_adapter": {
        "BaseStateDictAdapter.from_hf": "Hugging Face tensors to TorchTitan's.",
        "BaseStateDictAdapter.to_hf": "TorchTitan's tensors to Hugging Face's.",
    },
    "torchtitan.tools.profiler": {
        "Profiler.step": "At the end of an iteration.",
    },
    "torchtitan.tools.utils": {
        "device_module": "REPLACED on a CPU, also where other modules copied it.",
        "device_type": "REPLACED on a CPU, also where other modules copied it.",
        "set_default_dtype": "Builds the reference in the policy's dtype.",
    },
    "torchtitan.trainer": {
        "Trainer.checkpointer": "Saves and restores.",
        "Trainer.close": "OVERRIDDEN: the generator and the rewards end first.",
        "Trainer.dataloader": "Goes on where it was when a supervised run goes back.",
        "Trainer.forward_backward_step": "OVERRIDDEN in supervised runs: a sign of life, and the loss.",
        "Trainer.loss_fn": "Built by TorchTitan from `[loss]`.",
        "Trainer.lr_schedulers": "Steps with the optimiser.",
        "Trainer.metrics_processor": "Where metrics go.",
        "Trainer.model_config": "Built again for the reference and the local generator.",
        "Trainer.model_parts": "The policy: one module, or this rank's stages.",
        "Trainer.ntokens_seen": "Counts trained tokens, and is in the checkpoint.",
        "Trainer.optimizers": "The policy's.",
        "Trainer.parallel_dims": "The meshes of the run.",
        "Trainer.post_dataloading_process": "`ShardedModel.prepare` does the same to a micro-batch.",
        "Trainer.pp_schedule": "The schedule of the policy's stages; only there with a pipeline.",
        "Trainer.should_continue_training": "OVERRIDDEN: the safe point, and the end at `training.steps`.",
        "Trainer.step": "Optimiser steps, and is in the checkpoint.",
        "Trainer.train": "OVERRIDDEN in RL: the loop over iterations.",
        "Trainer.train_step": "OVERRIDDEN in supervised runs: a bad gradient ends it.",
        "Trainer.train_context": "Context of forward and backward passes.",
    },
}
"""What is reached through the imports: attributes, methods, and globals of modules."""

VLLM_IMPORTS = {
    "vllm.config.lora": {
        "MaxLoRARanks": "Ranks of adapters that an engine can be built for.",
    },
    "vllm.distributed.device_communicators": {
        "cpu_communicator": "Module of the memory that tensor-parallel ranks share on a CPU.",
    },
    "vllm.distributed.parallel_state": {
        "destroy_model_parallel": "Ends vLLM's process groups and leaves the trainer's.",
    },
    "vllm.lora.request": {
        "LoRARequest": "Names the adapter of a version: `lora.push = 'adapter'`.",
    },
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "VocabParallelEmbedding": "Its padding is not counted as unwritten.",
    },
    "vllm.model_executor.model_loader.reload.layerwise": {
        "get_layerwise_info": "vLLM's account of what a reload has written.",
    },
    "vllm.model_executor.model_loader.reload.meta": {
        "SKIP_LOAD_TENSORS": "Parameters that this account leaves out.",
    },
    "vllm.model_executor.model_loader.reload": {
        "finalize_layerwise_reload": "Clears the account after a failure.",
    },
    "vllm.platforms": {
        "current_platform": "Whether the engine runs on a CPU.",
    },
    "vllm.sampling_params": {
        "RequestOutputKind": "Only finished completions are returned.",
    },
    "vllm.v1.engine": {
        "core": "Module in which the clean-up is replaced.",
    },
    "vllm": {
        "EngineArgs": "The engine's settings.",
        "LLMEngine": "The engine.",
        "RequestOutput": "A finished request.",
        "SamplingParams": "How one request is sampled.",
    },
}
"""What is imported, in ``titan_rl/generation/`` alone."""

VLLM_REACHED = {
    "vllm.distributed.device_communicators.cpu_communicator": {
        "_CPUSHMDistributed.make_group_name": "REPLACED on a CPU: every launch has the same name.",
    },
    "vllm.lora.layers.base_linear": {
        "BaseLinearLayerWithLoRA.lora_a_stacked": "Where an adapter lies; summed up with the parameters.",
        "BaseLinearLayerWithLoRA.lora_b_stacked": "The same.",
    },
    "vllm.lora.model_manager": {
        "LoRAModelManager.lora_index_to_id": "The place of an adapter in it.",
        "LoRAModelManager.modules": "The layers that hold adapters.",
        "LoRAModelManager.packed_modules_mapping": "Which layers of the checkpoint one of them stands for.",
    },
    "vllm.lora.worker_manager": {
        "WorkerLoRAManager._adapter_manager": "Holds the adapters; read back after a push.",
    },
    "vllm.v1.worker.lora_model_runner_mixin": {
        "LoRAModelRunnerMixin.lora_manager": "The same, of a worker.",
    },
    "vllm.platforms.interface": {
        "Platform.is_cpu": "Whether the engine runs on a CPU.",
        "Platform.simple_compile_backend": "SET to eager on a CPU: no C++ compiler is needed.",
    },
    "vllm.v1.engine.core": {
        "cleanup_dist_env_and_memory": "REPLACED: it would destroy every process group, the trainer's too.",
    },
    "vllm.v1.worker.gpu_worker": {
        "Worker.model_runner": "Holds the model that weights are written to.",
        "Worker.reload_weights": "Replaces all weights from a stream.",
    },
    "vllm": {
        "LLMEngine.abort_request": "Drops requests.",
        "LLMEngine.add_lora": "Loads the adapter of a version.",
        "LLMEngine.list_loras": "Whether it is the only one.",
        "LLMEngine.add_request": "Queues a request of token ids.",
        "LLMEngine.collective_rpc": "Runs the reload in the engine's worker.",
        "LLMEngine.engine_core": "Shut down at the end.",
        "LLMEngine.from_engine_args": "Builds the engine.",
        "LLMEngine.reset_prefix_cache": "Drops keys and values of older weights.",
        "LLMEngine.sleep": "CUDA: gives memory back while the trainer works.",
        "LLMEngine.step": "Computes one token of every running request.",
        "LLMEngine.wake_up": "Undoes the sleep.",
        "RequestOutput.outputs": "Tokens and log-probabilities.",
        "RequestOutput.prompt_logprobs": "Scores of the handshake's probe.",
    },
}
"""What is reached through the imports."""


def markdown() -> str:
    """The page ``docs/symbols.md``."""
    parts = [_HEAD]
    for title, table in (
        ("TorchTitan: imported", TORCHTITAN_IMPORTS),
        ("TorchTitan: reached through the imports", TORCHTITAN_REACHED),
        ("vLLM: imported", VLLM_IMPORTS),
        ("vLLM: reached through the imports", VLLM_REACHED),
    ):
        rows = [
            f"| `{module}` | `{name}` | {purpose} |"
            for module, names in table.items()
            for name, purpose in names.items()
        ]
        parts.append(
            "\n".join([f"## {title}", "", "| module | name | what for |", "|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


_HEAD = """# Names of TorchTitan and vLLM in use

TorchTitan 0.3.0 changes its API with every release, and titan_rl uses some of its private names. This page
lists every name in use; `titan_rl/titan/` is the only package that imports TorchTitan, `titan_rl/generation/`
the only one that imports vLLM. `tests/unit/titan/test_symbols.py` finds each name, and
`test_torchtitan_contracts.py` beside it tries what is assumed of them: that is where an upgrade starts.
What is replaced, overridden or set is marked; "on a CPU" means that on CUDA TorchTitan stays as it is.
torch's pipeline schedules, which TorchTitan builds, are listed with it.

Made by `python scripts/make_symbols.py` from `titan_rl/titan/symbols.py`.
"""
