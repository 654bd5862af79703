"""Tiny random models of many families, built on the spot."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8, **WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOW},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3, **WINDOW},
    "phi3": WINDOW,
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "cohere2": {"logit_scale": 0.25, **WINDOW},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"n_positions": 256, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_inner": 48},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
}


def build_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of ``family`` whose logits are spread widely enough that argmax is no coin toss."""
    settings = {**SMALL, **FAMILIES[family], **overrides}
    if family == "gpt2":
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            settings.pop(name)
        settings.pop("max_position_embeddings")
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
