"""A Llama and a T5 of a few thousand parameters and tokens from a seed, for clients of transformers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

VOCABULARY, LENGTH = 64, 16


def llama(dtype=torch.float32, seed=0, kinds=(LlamaForCausalLM, LlamaConfig), **more):
    """Two layers, or as `more` says; the same values for the same seed. `kinds`: classes of another decoder."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    kind, config = kinds
    return kind(config(**(sizes | more))).to(dtype)


def t5(**more):
    """Two layers of an encoder and two of a decoder, with dropout, or as `more` says."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**(sizes | more), decoder_start_token_id=0, use_cache=False))


def rows(number=32):
    """Rows as a data collator takes them."""
    tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]
