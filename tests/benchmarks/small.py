"""A Flint that compiles in seconds, of the real structure."""

from modeling.flint.config import FlintConfig

SMALL = FlintConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
)
