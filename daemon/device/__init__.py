"""Is a device free?  Who uses it, asked of the driver in a process of its own."""
