"""Rewrites of a captured graph, each a pattern of ops into another."""
