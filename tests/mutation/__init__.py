"""One-line faults planted into copies of the package, and how many of them the tests notice."""
