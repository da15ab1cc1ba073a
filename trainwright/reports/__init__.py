"""Profile, Plan, Report → what a person reads: tables for the terminal, HTML files that stand alone."""
