"""Modules that the algorithms call for."""

from .stable_embedding import StableEmbedding

__all__ = ["StableEmbedding"]
