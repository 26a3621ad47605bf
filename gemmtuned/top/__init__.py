"""`gemmtuned top`: `picture` says what stands on the screen, `app` shows it, `actions` are behind the keys."""
