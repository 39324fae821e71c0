"""What a program uses: a connection, sandboxes and the results of actions."""
