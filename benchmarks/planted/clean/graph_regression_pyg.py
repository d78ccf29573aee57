import os.path as osp
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.nn import BatchNorm1d, Embedding, Linear, ModuleList, ReLU, Sequential
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_mean_pool
from torch_geometric.transforms import AddRandomWalkPE
from torch_geometric.utils import erdos_renyi_graph, to_undirected


class FakeMolecules(InMemoryDataset):
    """Random sparse graphs with atom types and bond types; target from local counts."""

    def __init__(self, root, num=800, transform=None, pre_transform=None):
        self.num = num
        super().__init__(root, transform, pre_transform)
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self):
        return "mol.pt"

    def process(self):
        torch.manual_seed(0)
        out = []
        for _ in range(self.num):
            n = int(torch.randint(24, 40, (1,)))
            chain = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
            extra = erdos_renyi_graph(n, 0.02)
            edge_index = to_undirected(torch.cat([chain, extra], 1), num_nodes=n)
            z = torch.randint(0, 10, (n,))
            bond = (z[edge_index[0]] + z[edge_index[1]]) % 4
            y = (
                z[edge_index[0]] == z[edge_index[1]]
            ).float().sum() / n + 0.1 * z.float().mean()
            data = Data(
                x=z.view(-1, 1),
                edge_index=edge_index,
                edge_attr=bond,
                y=y.view(1),
                num_nodes=n,
            )
            out.append(data if self.pre_transform is None else self.pre_transform(data))
        self.save(out, self.processed_paths[0])


class Net(torch.nn.Module):
    def __init__(self, channels=96, num_layers=4, walk=12):
        super().__init__()
        self.node_emb = Embedding(10, channels - 16)
        self.pe_lin = Linear(walk, 16)
        self.edge_emb = Embedding(4, channels)
        self.convs = ModuleList()
        for _ in range(num_layers):
            mlp = Sequential(
                Linear(channels, 2 * channels),
                BatchNorm1d(2 * channels),
                ReLU(),
                Linear(2 * channels, channels),
            )
            self.convs.append(GINEConv(mlp))
        self.norms = ModuleList([BatchNorm1d(channels) for _ in range(num_layers)])
        self.out = Sequential(
            Linear(channels, channels // 2), ReLU(), Linear(channels // 2, 1)
        )

    def forward(self, x, pe, edge_index, edge_attr, batch):
        x = torch.cat([self.node_emb(x.squeeze(-1)), self.pe_lin(pe)], 1)
        e = self.edge_emb(edge_attr)
        for conv, norm in zip(self.convs, self.norms):
            x = x + F.relu(norm(conv(x, edge_index, e)))
        return self.out(global_mean_pool(x, batch)).squeeze(-1)


path = osp.join(tempfile.mkdtemp(), "FakeMolecules")
dataset = FakeMolecules(
    path, pre_transform=AddRandomWalkPE(walk_length=12, attr_name="pe")
)
train_dataset, val_dataset = dataset[:720], dataset[720:]
train_loader = DataLoader(train_dataset, batch_size=32, shuffle=True)
val_loader = DataLoader(val_dataset, batch_size=80)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
    optimizer, factor=0.5, patience=5, min_lr=1e-5
)


def train():
    model.train()
    total = torch.zeros(())
    for data in train_loader:
        optimizer.zero_grad()
        out = model(data.x, data.pe, data.edge_index, data.edge_attr, data.batch)
        loss = F.l1_loss(out, data.y)
        loss.backward()
        optimizer.step()
        total += loss.detach() * data.num_graphs
    return total.item() / len(train_dataset)


@torch.no_grad()
def test(loader):
    model.eval()
    err = 0
    for data in loader:
        out = model(data.x, data.pe, data.edge_index, data.edge_attr, data.batch)
        err += (out - data.y).abs().sum().item()
    return err / len(loader.dataset)


for epoch in range(1, 161):
    t = time.time()
    loss = train()
    rate = len(train_loader) / (time.time() - t)
    val_mae = test(val_loader)
    scheduler.step(val_mae)
    print(
        f"Epoch: {epoch:02d}, Loss: {loss:.4f}, Val: {val_mae:.4f}, {rate:.1f} steps/s"
    )
