"""The training loop: whose examples come when, what it watches, what it writes."""
