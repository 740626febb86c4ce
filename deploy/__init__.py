"""What gets the service onto machines: install/ makes a checkout's environment; nginx, Prometheus, Kubernetes, Ray."""
