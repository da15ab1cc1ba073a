"""The search for a plan: relax, branch, fit the counts by simulation, and hold the answer against known ones."""
