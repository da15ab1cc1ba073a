"""Is a plan's step that of one process? What is compared, and how far it may be off."""
