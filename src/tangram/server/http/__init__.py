"""HTTP: sockets, authentication, routes and handlers."""
