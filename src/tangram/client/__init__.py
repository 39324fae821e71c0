"""The SDK: a connection, sandboxes and the results of actions."""
