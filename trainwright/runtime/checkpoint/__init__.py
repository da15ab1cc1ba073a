"""Saves and resumes planned runs, on any mesh, and exports whole weights in the user's model's form."""
