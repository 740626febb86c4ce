"""The sampling specification in torch: penalties, masks, filters, the draw, log-probabilities.

Main names: sample(), TorchSampler, SamplingInput, SampledToken, RowParameters, uniforms().
Invariants: A sampled token depends on (seed, choice, position) and its row alone, never on the rest of the batch.
docs/sampling.md is the specification.
"""
