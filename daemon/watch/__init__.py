"""The daemon's socket, on which it says what it does now: `server` answers, `ask` asks, `looks` and `users` gather."""
