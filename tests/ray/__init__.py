"""Runs the service on two local Ray nodes and breaks them under load: make ray."""
