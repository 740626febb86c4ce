"""The C++ backend: a decoder's steps and the sampler in native kernels; sources in source/.

Main names: NativeExecutor, NativeSampler, PackedDecoder, load_library().
Invariants: The bits of a row depend on its own sequence only. What the kernels compute is tested against torch's runner
and sampler.
"""
