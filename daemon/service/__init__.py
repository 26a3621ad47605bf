"""The daemon itself: one turn after another, and what surrounds the turns."""
