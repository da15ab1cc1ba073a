"""Checkpoints of a planned run, resumed on any mesh, and whole weights as the user's model has them."""
