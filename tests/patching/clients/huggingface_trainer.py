"""transformers' Trainer on a small Llama:
`python huggingface_trainer.py [--resume]`."""

import json
import sys
import textwrap

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


class Characters(torch.utils.data.Dataset):
    def __init__(self, text, length):
        self.ids = torch.tensor([min(ord(c), 127) for c in text])
        self.length = length

    def __len__(self):
        return len(self.ids) // self.length

    def __getitem__(self, i):
        ids = self.ids[i * self.length : (i + 1) * self.length]
        return {"input_ids": ids, "labels": ids}


with open(textwrap.__file__) as file:
    dataset = Characters(file.read()[:8000], 64)
train, evaluate = torch.utils.data.random_split(
    dataset, [0.9, 0.1], torch.Generator().manual_seed(0)
)
set_seed(42)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir="run",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=12,
    learning_rate=2e-3,
    weight_decay=0.01,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    logging_steps=1,
    save_steps=6,
    eval_strategy="steps",
    eval_steps=6,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=train,
    eval_dataset=evaluate,
    data_collator=default_data_collator,
)
trainer.train("run/checkpoint-6" if "--resume" in sys.argv else None)
trainer.save_model("model")
kept = ("loss", "eval_loss", "grad_norm", "learning_rate")
losses = [
    {name: row[name] for name in kept if name in row}
    for row in trainer.state.log_history
]
model.eval()
prompt = torch.tensor([[ord(c) for c in "def "]])
sample = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
print(json.dumps(losses[-1]), sample.tolist())
torch.save(
    {
        "losses": losses,
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "logits": model(prompt).logits.detach(),
    },
    "final.pt",
)
