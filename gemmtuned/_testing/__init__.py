"""What our tests need inside the package. Nothing here runs unless a test asks for it; users need none of it."""
