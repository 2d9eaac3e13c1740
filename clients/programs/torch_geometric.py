"""Graphs: nodes by an LSTM over their neighbours, graphs by `Set2Set` and a GRU cell, and two kinds of nodes."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GatedGraphConv, GraphSAGE, GRUAggregation, SAGEConv, Set2Set, to_hetero

import gatewise
from clients.trial import Trial


class Whole(nn.Module):
    """A number for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = GatedGraphConv(8, num_layers=3)
        self.ordered = GRUAggregation(8, 6, num_layers=2)
        self.unordered = Set2Set(8, processing_steps=3, num_layers=2)
        self.out = nn.Linear(6 + 16, 1)

    def forward(self, data: Data) -> torch.Tensor:
        x = self.steps(data.x, data.edge_index).relu()
        found = self.ordered(x, data.batch), self.unordered(x, data.batch)
        return self.out(torch.cat(found, dim=1)).squeeze(1)


class Kinds(nn.Module):
    """A layer of nodes whose neighbours are of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv((5, 5), 8, aggr="lstm")
        self.over_time = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        found = self.first(x, edge_index).relu()
        return self.over_time(found.unsqueeze(1))[0].squeeze(1)


def edges(sources: int, targets: int, count: int) -> torch.Tensor:
    found = torch.stack([torch.randint(sources, (count,)), torch.randint(targets, (count,))])
    return found[:, found[1].argsort(stable=True)]  # an LSTM reads neighbours in the order of the nodes


def graph() -> Data:
    nodes = int(torch.randint(5, 12, ()))
    x = torch.randn(nodes, 5)
    return Data(x=x, edge_index=edges(nodes, nodes, 3 * nodes), y=x.sum())


def step(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    trial.compare("losses", loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


with Trial("torch-geometric", "gatewise.accelerate(model)") as trial, tempfile.TemporaryDirectory() as folder:
    nodes = GraphSAGE(5, 12, num_layers=3, out_channels=3, dropout=0.1, jk="lstm", aggr="lstm")
    graphs = Whole()
    kinds = to_hetero(Kinds(), (["user", "item"], [("user", "buys", "item"), ("item", "bought_by", "user")]))
    if trial.gatewise:
        for model in (nodes, graphs, kinds):
            gatewise.accelerate(model)

    one = Data(x=torch.randn(40, 5), edge_index=edges(40, 40, 150), y=torch.randint(3, (40,)))
    optimizer = torch.optim.Adam(nodes.parameters(), 0.01)
    for _ in range(6):
        step(nn.functional.cross_entropy(nodes(one.x, one.edge_index), one.y), optimizer)
    file = Path(folder) / "nodes.pt"
    torch.save(nodes.eval(), file)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        answers = [each(one.x, one.edge_index) for each in (nodes, loaded)]
    trial.compare("scores", answers[0])
    trial.saved("torch.save, torch.load", *answers, loaded)

    optimizer = torch.optim.Adam(graphs.parameters(), 0.01)
    for _ in range(2):
        for batch in DataLoader([graph() for _ in range(24)], batch_size=8):
            step(nn.functional.mse_loss(graphs(batch), batch.y), optimizer)

    data = HeteroData()
    data["user"].x, data["item"].x = torch.randn(12, 5), torch.randn(9, 5)
    data["user", "buys", "item"].edge_index = edges(12, 9, 40)
    data["item", "bought_by", "user"].edge_index = edges(9, 12, 40)
    optimizer = torch.optim.Adam(kinds.parameters(), 0.01)
    for _ in range(6):
        found = kinds(data.x_dict, data.edge_index_dict)
        step(found["user"].pow(2).mean() + (found["item"] - 1).pow(2).mean(), optimizer)
