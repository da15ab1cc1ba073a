"""Modules that the algorithms call for."""
