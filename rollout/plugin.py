"""vLLM plugin of lockstep (entry point `vllm.general_plugins`), run once in every vLLM process."""

_registered = False


def register() -> None:
    """Install what the platform lacks; idempotent, since vLLM may load plugins more than once in a process."""
    global _registered
    if _registered:
        return
    from rollout.patching import patch_target

    platform = patch_target("vllm.platforms:current_platform")
    # verl 0.9.1 asks for get_unstacked_mapper, the name it has in later releases of vLLM; here it is get_rename_mapper.
    mapper = patch_target("vllm.model_executor.models.utils:WeightsMapper")
    if not hasattr(mapper, "get_unstacked_mapper"):
        mapper.get_unstacked_mapper = patch_target("vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper")
    _register_minimax_m3()
    if platform.is_cpu():
        from rollout import cpu

        cpu.install()
    elif platform.is_cuda():
        from rollout import marlin

        marlin.install()
    _registered = True


def _register_minimax_m3() -> None:
    """Text-only MiniMax-M3: its configuration for AutoConfig, and the model with LoRA instead of vLLM's own."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from rollout.patching import patch_target

    models = patch_target("vllm.model_executor.models.registry:ModelRegistry")
    models.register_model("MiniMaxM3SparseForCausalLM", "rollout.minimax_m3:MiniMaxM3ForCausalLM")
    # The trainer may have registered a class of its own in this process: it stays.
    config = patch_target("vllm.transformers_utils.configs.minimax_m3:MiniMaxM3TextConfig")
    if config.model_type not in CONFIG_MAPPING:
        AutoConfig.register(config.model_type, config)
    hooks = patch_target("vllm.model_executor.models.config:MODELS_CONFIG_MAP")
    hooks["MiniMaxM3SparseForCausalLM"] = MiniMaxM3Pages


class MiniMaxM3Pages:
    """Pages of the KV cache are the blocks of sparse attention: vLLM asks the first layer, which is dense, for 16."""

    @staticmethod
    def verify_and_update_config(vllm_config) -> None:
        """Called by vLLM with its VllmConfig before anything is built; ValueError for a block_size that cannot work."""
        cache, needed = vllm_config.cache_config, vllm_config.model_config.hf_config.sparse_attention_config
        size = needed["sparse_block_size"]
        if cache.user_specified_block_size and cache.block_size != size:
            raise ValueError(f"block_size {cache.block_size}: MiniMax-M3 needs {size}; leave it out")
        cache.block_size, cache.user_specified_block_size = size, True

    @staticmethod
    def verify_and_update_model_config(model_config) -> None:
        """Nothing to change."""
