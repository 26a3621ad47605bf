"""The worker's process: the only part of the daemon that imports torch and holds a device."""
