"""Everything that torch does not promise: private names with the reason for each, fake tensors, nested arguments."""
