"""The service on two local Ray nodes that are broken under load: make ray."""
