"""A character LSTM with truncated backpropagation and ReduceLROnPlateau."""

import math
import string

import torch
from torch import nn

with open(string.__file__) as file:
    text = file.read()[:6000]
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])


class RNN(nn.Module):
    def __init__(self, vocab, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocab)

    def forward(self, x, state=None):
        y, state = self.lstm(self.embed(x), state)
        return self.head(y), state


def batchify(data, rows):
    return data[: len(data) // rows * rows].view(rows, -1)


torch.manual_seed(21)
model = RNN(len(chars))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, amsgrad=True)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
rows, losses, rates = batchify(data, 8), [], []
for _epoch in range(2):
    state = None
    for at in range(0, 320, 32):
        x, y = rows[:, at : at + 32], rows[:, at + 1 : at + 33]
        if state is not None:
            state = tuple(s.detach() for s in state)
        logits, state = model(x, state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item())
        plateau.step(loss.item() + (at % 64))
        rates.append(optimizer.param_groups[0]["lr"])
    print(f"perplexity {math.exp(losses[-1]):.2f}, lr {rates[-1]}")
torch.save(
    {
        "losses": losses,
        "rates": rates,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": plateau.state_dict(),
    },
    "final.pt",
)
