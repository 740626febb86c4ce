"""The C++ backend: a decoder's steps and the sampler in native kernels; sources in source/."""
