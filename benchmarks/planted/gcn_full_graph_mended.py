"""Node classification with a GCN: which package does a module belong to?

The graph: one node a module of Python's standard library, one edge an import.
"""

import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv


def load():
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py")) + sorted(library.glob("*/*.py"))
    files = [f for f in files if f.parent.name not in ("test", "lib2to3")]
    index = {f.stem: i for i, f in enumerate(files)}
    texts = [f.read_text(errors="ignore") for f in files]
    counts = Counter(w for t in texts for w in set(re.findall(r"[a-z_]{3,}", t)))
    vocabulary = {w: i for i, (w, _) in enumerate(counts.most_common(1000))}
    x = torch.zeros(len(files), len(vocabulary))
    edges = []
    for i, text in enumerate(texts):
        for word in re.findall(r"[a-z_]{3,}", text):
            if word in vocabulary:
                x[i, vocabulary[word]] += 1
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            edges += [
                (i, index[n.split(".")[-1]]) for n in names if n.split(".")[-1] in index
            ]
    edge_index = torch.tensor(edges).t()
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    parents = sorted({f.parent.name for f in files})
    y = torch.tensor([parents.index(f.parent.name) for f in files])
    return Data(x=F.normalize(x), edge_index=edge_index, y=y)


class GCN(torch.nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.conv1 = GCNConv(features, hidden)
        self.conv2 = GCNConv(hidden, classes)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


torch.manual_seed(0)
data = load()
order = torch.rand(data.num_nodes)
splits = {
    "train": order < 0.6,
    "val": (order >= 0.6) & (order < 0.8),
    "test": order >= 0.8,
}
model = GCN(data.num_features, 256, int(data.y.max()) + 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[splits["train"]], data.y[splits["train"]])
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def test():
    model.eval()
    accuracies = []
    for mask in splits.values():
        pred = model(data.x, data.edge_index).argmax(dim=-1)
        accuracies.append(int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()))
    return accuracies


best_val = test_acc = 0
for epoch in range(1, 401):
    loss = train()
    if epoch % 20 == 0:
        train_acc, val_acc, tmp_test_acc = test()
        if val_acc > best_val:
            best_val, test_acc = val_acc, tmp_test_acc
    if epoch % 100 == 0:
        print(f"{epoch}: loss {loss:.3f}, train {train_acc:.3f}, test {test_acc:.3f}")
