"""The MODEL argument: an example by name, a file, a class, a model of a hub."""
