"""What the daemon and its worker say to each other, and what may be asked of a search."""
