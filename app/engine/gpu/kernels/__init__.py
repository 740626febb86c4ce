"""Operations of a step on a GPU: their interface, their layouts, and reference implementations in torch."""
