"""A small graph network: its batch is one graph, given by its nodes and the two ends of its edges; nothing is a sample."""

from __future__ import annotations

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, edges):
        gathered = torch.zeros_like(x).index_add(0, edges[1], self.near(x)[edges[0]])
        return torch.relu(self.own(x) + gathered)


class Graph(nn.Module):
    def __init__(self, width: int = 16, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x, edge_index, y):
        for layer in self.layers:
            x = layer(x, edge_index)
        return nn.functional.cross_entropy(self.head(x), y)


def build(num_nodes: int = 60, num_edges: int = 200, width: int = 16):
    """Return the model and one graph."""
    batch = {
        "x": torch.randn(num_nodes, width),
        "edge_index": torch.randint(0, num_nodes, (2, num_edges)),
        "y": torch.randint(0, 3, (num_nodes,)),
    }
    return Graph(width), batch
