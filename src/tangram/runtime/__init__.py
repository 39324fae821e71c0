"""The runtime: what an embedded client, the SDK over HTTP and the server share."""
