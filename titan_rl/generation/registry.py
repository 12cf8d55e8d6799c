"""The generators that a configuration can name; :func:`titan_rl.config.registry.resolve` resolves them."""

GENERATORS = {
    "vllm": "titan_rl.generation.vllm:VllmGenerator",
    "local": "titan_rl.generation.local:LocalGenerator",
}
