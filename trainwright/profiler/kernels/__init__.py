"""Memory that kernels take for themselves: measured where they run, worked out for GPUs."""
