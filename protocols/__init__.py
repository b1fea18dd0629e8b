"""The contract between the services: messages, wire format, channels."""
