"""One test file or more for each promise of RELIABILITY.md: make promises."""
