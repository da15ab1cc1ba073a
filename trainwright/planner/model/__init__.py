"""The mixed-integer program: each file its columns and rows, and how a solution is read."""
