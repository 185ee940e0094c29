"""The gateway: HTTP in front of the queue."""
