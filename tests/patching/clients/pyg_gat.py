"""PyTorch Geometric: attention over small graphs, batched by its DataLoader."""

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, GraphNorm, global_mean_pool

seed_everything(11)


def ring(nodes, chords):
    at = torch.arange(nodes)
    edges = torch.stack([at, (at + 1) % nodes])
    extra = torch.randint(nodes, (2, chords))
    edges = torch.cat([edges, edges.flip(0), extra], dim=1)
    return Data(x=torch.randn(nodes, 8), edge_index=edges, y=torch.tensor([chords % 3]))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = GATConv(8, 16, heads=2), GraphNorm(32)
        self.second, self.out = GCNConv(32, 32), torch.nn.Linear(32, 3)

    def forward(self, x, edge_index, batch):
        x = F.elu(self.norm(self.first(x, edge_index), batch))
        x = F.dropout(F.relu(self.second(x, edge_index)), 0.2, self.training)
        return self.out(global_mean_pool(x, batch))


graphs = [ring(6 + i % 7, i % 5) for i in range(64)]
loader = DataLoader(graphs, batch_size=16, shuffle=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
losses = []
for _epoch in range(4):
    model.train()
    for data in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(losses)
torch.save(
    {
        "losses": losses,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
    "final.pt",
)
