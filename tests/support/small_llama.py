"""A Llama of a few thousand parameters and tokens from a seed, for clients of transformers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 64, 16


def llama(dtype=torch.float32, seed=0, **more):
    """Two layers, or as `more` says; the same values for the same seed."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**(sizes | more))).to(dtype)


def rows(number=32):
    """Rows as a data collator takes them."""
    tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]
