"""What graph_syntax_trees.py trains: a few rounds of messages between the nodes, of
which every relation has its own kind in either direction, and a mean over the graph."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (rows, width), (messages,) which rows, (messages,) to which nodes, nodes -> their sums
Sums = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def sums(table: Tensor, rows: Tensor, targets: Tensor, n: int) -> Tensor:
    """The sum of the messages that each node gets, (n, width)."""
    messages = table.index_select(0, rows)
    return table.new_zeros(n, table.shape[1]).index_add(0, targets, messages)


def pyg_sums() -> Sums:
    """The same through PyTorch Geometric."""
    from torch_geometric.nn import MessagePassing

    class Layer(MessagePassing):
        def forward(self, table: Tensor, rows: Tensor, targets: Tensor, n: int):
            edges, sizes = torch.stack([rows, targets]), (len(table), n)
            return self.propagate(edges, size=sizes, x=(table, None))

        def message(self, x_j: Tensor) -> Tensor:
            return x_j  # the sender's row

    return Layer(aggr="add")


class Round(nn.Module):
    def __init__(self, width: int, kinds: int) -> None:
        super().__init__()
        self.messages = nn.Linear(width, kinds * width, bias=False)
        self.own = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, x: Tensor, rows: Tensor, targets: Tensor, degree: Tensor, sums: Sums
    ) -> Tensor:
        table = self.messages(x).reshape(-1, x.shape[1])  # (nodes * kinds, width)
        means = sums(table, rows, targets, len(x)) / degree
        return x + F.relu(self.norm(self.own(x) + means))


class GNN(nn.Module):
    """From a batch's x, walks, edge_index, edge_attr and batch to a number a graph."""

    def __init__(
        self,
        kinds: int,
        words: int,
        steps: int,
        relations: int,
        width: int,
        rounds: int,
        sums: Sums = sums,
    ) -> None:
        super().__init__()
        self.kinds, self.words = nn.Embedding(kinds, width), nn.Embedding(words, width)
        self.walks = nn.Linear(steps, width)
        self.rounds = nn.ModuleList(Round(width, 2 * relations) for _ in range(rounds))
        self.head = nn.Linear(width, 1)
        self.relations, self.sums = relations, sums

    def forward(self, graphs: Mapping[str, Tensor]) -> Tensor:
        kinds, words = graphs["x"].unbind(1)
        x = self.kinds(kinds) + self.words(words) + self.walks(graphs["walks"])
        first, second = graphs["edge_index"]
        there, back = graphs["edge_attr"], graphs["edge_attr"] + self.relations
        sources, targets = torch.cat([first, second]), torch.cat([second, first])
        rows = sources * 2 * self.relations + torch.cat([there, back])
        degree = torch.bincount(targets, minlength=len(x)).clamp(min=1)[:, None]
        for round in self.rounds:
            x = round(x, rows, targets, degree, self.sums)
        return self.head(self.means(x, graphs["batch"], len(graphs["y"]))).squeeze(1)

    def means(self, x: Tensor, graph: Tensor, n: int) -> Tensor:
        """The mean over each graph's nodes, (n, width)."""
        count = torch.bincount(graph, minlength=n)[:, None]
        return sums(x, torch.arange(len(x), device=x.device), graph, n) / count
