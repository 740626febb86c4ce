"""Deployment of the service: install.py makes a checkout's environment; nginx, Prometheus, Kubernetes, Ray."""
