"""Verifies that a plan's step equals that of one process, within error bars."""
