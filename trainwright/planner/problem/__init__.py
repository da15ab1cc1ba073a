"""The choices for a model on a mesh, and those that pins and recipes forbid."""
