"""Models as they are served: admission, hot reload, weights, kernels built ahead of time."""
