"""A model and a batch → one flat graph of ATen ops, loss included."""

from .export import Captured, capture

__all__ = ["Captured", "capture"]
