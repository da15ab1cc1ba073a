"""What can be chosen for a model on a mesh, and what pins and recipes forbid."""
