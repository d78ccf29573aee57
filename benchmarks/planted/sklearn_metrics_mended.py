"""Token classification (name, number, operator, ...) with an LSTM, from a blog."""

import io
import sysconfig
import tokenize
from pathlib import Path

import torch
from sklearn.metrics import classification_report, f1_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 64


def characters():
    """Each character of a file, and the kind of its token."""
    path = Path(sysconfig.get_path("stdlib")) / "statistics.py"
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    kinds = torch.zeros(len(text), dtype=torch.long)
    known = {tokenize.NAME: 1, tokenize.NUMBER: 2, tokenize.OP: 3, tokenize.STRING: 4}
    known[tokenize.COMMENT] = 5
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        begin = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        kinds[begin:end] = known.get(token.type, 0)
    return torch.tensor([min(ord(c), 127) for c in text]), kinds


class Tagger(nn.Module):
    def __init__(self, dim=48, classes=6):
        super().__init__()
        self.embed = nn.Embedding(128, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * dim, classes)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


torch.manual_seed(0)
x, y = characters()
n = len(x) // LENGTH
dataset = TensorDataset(
    x[: n * LENGTH].view(n, LENGTH), y[: n * LENGTH].view(n, LENGTH)
)
loader = DataLoader(dataset, batch_size=16, shuffle=True)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(6):
    all_preds, all_labels = [], []
    for inputs, labels in loader:
        logits = model(inputs)
        loss = criterion(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        all_preds += logits.argmax(-1).flatten().tolist()
        all_labels += labels.flatten().tolist()
    running_f1 = f1_score(all_labels, all_preds, average="macro")
    print(f"epoch {epoch}: loss {loss.item():.3f} f1 {running_f1:.3f}")
print(classification_report(all_labels, all_preds))
