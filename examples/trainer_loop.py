"""The Hugging Face Trainer: torchrun --nproc-per-node 2 examples/trainer_loop.py."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardclip.integrations.transformers import ShardclipMixin


class ClippedTrainer(ShardclipMixin, Trainer):
    """Any Trainer, clipped by shardclip; its logs have what clipping did."""


def main() -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**size, **layers))
    rows = torch.randint(0, 64, (64, 16))
    arguments = TrainingArguments(
        max_grad_norm=0.5,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = ClippedTrainer(model, arguments, train_dataset=data)
    trainer.train()
    trainer.accelerator.print(trainer.clipping and trainer.clipping.result)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
