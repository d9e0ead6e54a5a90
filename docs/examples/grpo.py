"""A loop of GRPO on a processor: a sampler follows its trainer by patches, and the trainer rests meanwhile.

    python docs/examples/grpo.py --nvme-path /mnt/nvme0
    python docs/examples/grpo.py --nvme-path /mnt/nvme0 --whole     # all weights after each step: the same tokens

A tiny Llama learns to write even numbers. Sampler and trainer are two models; in one process here. Needs transformers.
"""

import argparse
import copy
import hashlib

import torch
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

from nvme_offload import apply_patch, initialize

PROMPTS, GROUP, LENGTH, WORDS = 4, 8, 12, 64


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", required=True, help="folder on the drive that takes parameters and state")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--whole", action="store_true", help="send all weights, not patches")
    args = parser.parse_args()

    torch.manual_seed(0)
    shape = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, max_position_embeddings=64, **shape)
    sampler = LlamaForCausalLM(config).bfloat16().eval()
    on_nvme = {"device": "nvme", "nvme_path": args.nvme_path}
    section = {
        "zero_optimization": {"stage": 3, "offload_optimizer": on_nvme, "offload_param": on_nvme},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
    }
    tokens_seen, sent = hashlib.sha256(), 0
    prompts = torch.randint(0, WORDS, (PROMPTS, 4)).repeat_interleave(GROUP, 0)
    with initialize(copy.deepcopy(sampler).float(), section) as engine:
        version = apply_patch(sampler, engine.weights(since=""))
        for step in range(args.steps):
            engine.park()  # the trainer needs no memory while the sampler works
            tokens = sampler.generate(prompts, do_sample=True, max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None)
            tokens_seen.update(tokens.numpy().tobytes())

            reward = (tokens[:, 4:] % 2 == 0).float().mean(1)
            groups = reward.view(PROMPTS, GROUP)
            advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
            logits = engine(input_ids=tokens).logits[:, 3:-1].float()  # wakes the trainer
            chosen = log_softmax(logits, -1).gather(-1, tokens[:, 4:, None]).squeeze(-1)
            # On the policy that sampled, the ratio of GRPO is 1 and has this gradient.
            engine.backward(-((chosen - chosen.detach()).exp() * advantage).mean())
            engine.step()

            patch = engine.weights(since="" if args.whole else version)
            changes = list(patch)
            sent += sum(change.size_bytes for change in changes)
            version = apply_patch(sampler, patch.of(changes))
            print(f"step {step} reward {reward.mean():.3f}", flush=True)
    print(f"{sent} bytes sent, tokens {tokens_seen.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
