"""Trains a small Llama in Hugging Face's `Trainer`, with its optimizer state on NVMe. Needs transformers, accelerate.

python docs/examples/train_with_trainer.py --nvme-path /mnt/nvme0
python docs/examples/train_with_trainer.py --nvme-path /mnt/nvme0 --steps 60 --resume
torchrun --nproc-per-node 2 docs/examples/train_with_trainer.py --nvme-path /mnt/nvme0     # with DDP
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from nvme_offload import OffloadAdamW

LENGTH, EXAMPLES = 128, 512


def dataset() -> list[dict[str, torch.Tensor]]:
    """Stretches of Python's own standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.tensor(bytearray(b"".join(file.read_bytes() for file in files))[: LENGTH * EXAMPLES])
    return [{"input_ids": part, "labels": part} for part in text.long().split(LENGTH)]


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", required=True, help="folder on the drive that takes the optimizer state")
    parser.add_argument("--output-dir", default="trainer-out", help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --output-dir")
    args = parser.parse_args()

    settings = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        max_grad_norm=1.0,  # Trainer clips p.grad; then leave gradient_clipping out of the section
        logging_steps=1,
        save_steps=max(1, args.steps // 2),
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
    )
    # bf16 parameters, fp32 masters in the optimizer's state; on its device before the optimizer is made
    model = LlamaForCausalLM(config).bfloat16().to(settings.device)
    offload = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": args.nvme_path}}}
    with OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, offload=offload) as optimizer:
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        trainer = Trainer(model=model, args=settings, train_dataset=dataset(), optimizers=(optimizer, schedule))
        trainer.accelerator.device_placement = False  # or accelerate passes the whole state through memory once
        trainer.train(resume_from_checkpoint=args.resume)
        if trainer.is_world_process_zero():
            print(f"state on {optimizer.stats().engine}: {optimizer.stats().bytes_written} bytes written")


if __name__ == "__main__":
    main()
