"""One file per command; `gemmtuned.cli` lists them."""
