"""Learning rates, momenta and batch sizes over a run, one schedule a file."""
