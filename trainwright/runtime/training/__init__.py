"""Trains a planned module: order of examples, training loop, checks of each step, watchdog and trace."""
