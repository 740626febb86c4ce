"""The CUDA backend: decoder, runner, CUDA graphs, resident batch.

Main names: DeviceRunner, DeviceExecutor, PagedDecoder, ResidentBatch, quantize_decoder().
Invariants: A launched step waits for nothing on the host. Captured, eager and one-step-ahead runs draw the same tokens.
"""
