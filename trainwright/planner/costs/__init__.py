"""The seconds and bytes of an option, by formula, and of a whole step, by simulation."""
