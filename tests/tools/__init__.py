"""Programs for maintainers, run as modules from the repository root."""
