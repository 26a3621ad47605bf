"""Leaf package: what a problem and a solution are, settings, errors, table formats. Standard library only."""
