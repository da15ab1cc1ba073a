"""The planning problem of a model on a mesh, and the options that pins and recipes forbid."""
