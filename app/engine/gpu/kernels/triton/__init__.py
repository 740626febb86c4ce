"""Operations of a step in Triton; the only files that import it.

Main names: One kernel family per file, behind the interface in app/engine/gpu/kernels/interface.py.
Invariants: Each kernel matches its torch reference; reductions have a fixed order, so that a row's bits do not depend
on the batch.
"""
