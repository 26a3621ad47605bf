"""The store: one SQLite file where programs and the daemon meet. Start at store.py (write) and queries.py (read)."""
