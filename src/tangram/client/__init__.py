"""The SDK, which a program uses: a connection, sandboxes and the results of actions."""
