"""Seconds and bytes of a choice, and of a whole step: by formula, and by simulation."""
