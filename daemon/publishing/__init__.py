"""From the verdicts in the database to the tables that programs read."""
