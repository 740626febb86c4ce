"""Load generator, comparisons with other engines, and measurements of single parts."""
