"""Models as they are served: admission, hot reload, health, kernels built ahead of time.

Main names: Service, AdmissionControl, ModelInstance, HotReload, FailureMonitor.
Invariants: New weights replace good ones only after they have passed every check; running streams end on the weights
they began with.
"""
