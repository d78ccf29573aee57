"""Graph classification with a GIN on syntax trees of Python's standard library."""

import ast
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.nn import MLP, GINConv, global_add_pool

from trainfast.torch.pyg import DataLoader, cached

KINDS = {kind: i for i, kind in enumerate(sorted(vars(ast)))}


def graphs():
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("*.py"))[:60]:
        for node in ast.walk(ast.parse(path.read_text(errors="ignore"))):
            if isinstance(node, ast.FunctionDef):
                children = list(ast.walk(node))
                if not 20 <= len(children) <= 300:
                    continue
                at = {id(child): i for i, child in enumerate(children)}
                edges = [
                    (at[id(child)], at[id(below)])
                    for child in children
                    for below in ast.iter_child_nodes(child)
                ]
                edge_index = torch.tensor(edges).t()
                edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
                kinds = torch.tensor(
                    [KINDS[type(child).__name__] for child in children]
                )
                returns = any(isinstance(child, ast.Return) for child in children)
                yield Data(
                    x=F.one_hot(kinds, len(KINDS)).float(),
                    edge_index=edge_index,
                    y=torch.tensor([int(returns)]),
                )


class SyntaxTrees(InMemoryDataset):
    def __init__(self, transform=None):
        super().__init__(None, transform)
        self.data, self.slices = self.collate(list(graphs()))


class GIN(torch.nn.Module):
    def __init__(self, features, hidden=64, layers=3):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for _ in range(layers):
            self.convs.append(GINConv(MLP([features, hidden, hidden]), train_eps=False))
            features = hidden
        self.mlp = MLP([hidden, hidden, 2], norm=None, dropout=0.5)

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.mlp(global_add_pool(x, batch))


torch.manual_seed(12345)
walks = T.AddRandomWalkPE(walk_length=16, attr_name=None)
dataset = cached(SyntaxTrees(transform=walks), tempfile.mkdtemp(), transform=None)
dataset = dataset.shuffle()
split = len(dataset) // 10
train_loader = DataLoader(dataset[split:], batch_size=64, shuffle=True)
test_loader = DataLoader(dataset[:split], batch_size=64)
model = GIN(dataset[0].num_features)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

for epoch in range(1, 6):
    model.train()
    total = 0.0
    for data in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
        loss.backward()
        optimizer.step()
        total += loss.item() * data.num_graphs
    print(f"epoch {epoch}: loss {total / len(train_loader.dataset):.4f}")

model.eval()
with torch.no_grad():
    right = sum(
        int((model(d.x, d.edge_index, d.batch).argmax(-1) == d.y).sum())
        for d in test_loader
    )
print(f"accuracy {right / split:.3f}")
