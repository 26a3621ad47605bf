"""What the read commands show: each report is built from db.queries and rendered as text or as JSON."""
