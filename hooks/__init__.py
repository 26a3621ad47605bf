"""What runs inside the user's program: capture, look-up, routes, reload. It must never fail, slow or change it."""
