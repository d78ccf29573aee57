"""A small GPT-2 (from config) on Python source, characters as tokens."""

import sysconfig
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup


class CharCorpus:
    def __init__(self, n_files=60):
        lib = Path(sysconfig.get_paths()["stdlib"])
        text = "\n".join(
            p.read_text(encoding="utf-8", errors="ignore")
            for p in sorted(lib.glob("*.py"))[:n_files]
        )
        chars = sorted(set(text))
        self.stoi = {c: i for i, c in enumerate(chars)}
        self.itos = chars
        # encoded once, kept as one long tensor
        ids = torch.tensor([self.stoi[c] for c in text], dtype=torch.long)
        cut = int(0.95 * len(ids))
        self.train, self.val = ids[:cut], ids[cut:]

    def batch(self, split, batch_size, block):
        data = self.train if split == "train" else self.val
        start = torch.randint(len(data) - block, (batch_size, 1))
        return data[start + torch.arange(block)]


class Trainer:
    def __init__(self, model, corpus, steps=2200, batch_size=8, block=64, lr=6e-4):
        self.model, self.corpus = model, corpus
        self.steps, self.batch_size, self.block = steps, batch_size, block
        decay = [p for p in model.parameters() if p.dim() >= 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        self.opt = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": 0.1},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=lr,
        )
        self.sched = get_cosine_schedule_with_warmup(self.opt, 100, steps)

    def train_step(self):
        ids = self.corpus.batch("train", self.batch_size, self.block)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        self.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.sched.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches=5):
        self.model.eval()
        total = 0.0
        for _ in range(batches):
            ids = self.corpus.batch("val", self.batch_size, self.block)
            total += self.model(input_ids=ids, labels=ids, use_cache=False).loss.item()
        self.model.train()
        return total / batches

    def fit(self, log_every=50, eval_every=500):
        self.model.train()
        t0 = time.time()
        for step in range(1, self.steps + 1):
            loss = self.train_step()
            if step % log_every == 0:
                print(f"step {step} loss {loss.item():.3f} {time.time() - t0:.1f} s")
            if step % eval_every == 0:
                print(f"step {step} val {self.evaluate():.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    corpus = CharCorpus()
    config = GPT2Config(
        vocab_size=len(corpus.itos),
        n_positions=64,
        n_embd=128,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    print(f"{model.num_parameters()} parameters, {len(corpus.train)} characters")
    Trainer(model, corpus).fit()
