"""The sampling specification in torch: penalties, masks, filters, the draw, log-probabilities.

Main names: sample(), TorchSampler, SamplingInput, SampledToken, uniforms().
Invariants: A draw depends on (seed, choice, position) and its row alone, whatever else is in the batch.
docs/sampling.md is the specification.
"""
