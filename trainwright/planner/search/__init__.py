"""How the problem is solved: relax, branch, fit the counts by simulation, and hold the answer against known ones."""
