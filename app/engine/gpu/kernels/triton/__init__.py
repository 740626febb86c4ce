"""Operations of a step in Triton; the only files that import it."""
