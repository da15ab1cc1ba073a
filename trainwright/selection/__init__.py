"""Which examples to train on: weighted subsets, one selector a file."""
