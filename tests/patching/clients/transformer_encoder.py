"""nn.TransformerEncoder as a classifier of handwritten digits, with padding."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(8)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images[:240], dtype=torch.float32).view(-1, 8, 8) / 16
labels = torch.tensor(labels[:240])
lengths = torch.randint(5, 9, (240,))
padding = torch.arange(8) >= lengths[:, None]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(torch.zeros(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(32, 10)

    def forward(self, x, padding):
        x = self.encoder(self.embed(x) + self.place, src_key_padding_mask=padding)
        x = x.masked_fill(padding[..., None], 0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=18)
losses, correct = [], []
for _epoch in range(3):
    model.train()
    for at in range(0, 192, 32):
        part = slice(at, at + 32)
        loss = nn.functional.cross_entropy(
            model(images[part], padding[part]), labels[part]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(images[192:], padding[192:])
    losses.append(nn.functional.cross_entropy(logits, labels[192:]).item())
    print(f"loss {losses[-1]:.4f}")
torch.save(
    {
        "losses": losses,
        "logits": logits,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    },
    "final.pt",
)
