"""Trainwright: how should this PyTorch model be trained on this hardware?"""
__version__ = "0.1.0"
