"""A small U-Net: what is held across the whole depth is most of its memory, and no two blocks are alike."""

from __future__ import annotations

import torch
from torch import nn


class Pair(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.norm = nn.GroupNorm(4, made)

    def forward(self, x):
        return torch.relu(self.second(self.norm(torch.relu(self.first(x)))))


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.deep, self.bottom = Pair(3, width), Pair(width, 2 * width), Pair(2 * width, 4 * width)
        self.rise, self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), Pair(4 * width, 2 * width)
        self.rise_again, self.top = nn.ConvTranspose2d(2 * width, width, 2, 2), Pair(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images, targets):
        near = self.down(images)
        far = self.deep(nn.functional.max_pool2d(near, 2))
        x = self.bottom(nn.functional.max_pool2d(far, 2))
        x = self.up(torch.cat([self.rise(x), far], 1))
        x = self.top(torch.cat([self.rise_again(x), near], 1))
        return nn.functional.cross_entropy(self.head(x), targets)


def build(batch_size: int = 4, size: int = 32):
    """Return the model and a batch of square images."""
    batch = {"images": torch.randn(batch_size, 3, size, size), "targets": torch.randint(0, 2, (batch_size, size, size))}
    return UNet(), batch
