"""Predicts the workspaces of kernels: by measurement or formula on a CPU, by formula for GPUs."""
