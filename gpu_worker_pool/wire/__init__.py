"""The protocol: the type of every body, the route table, the readers, the transport.

Server, client, command line and doctor all use them. Nothing here imports a framework, so that the client stays light.
Each type is what goes over HTTP, key by key, in the order in which it is sent. A field that may be null or has a default
may be missing in the answer of another server (see `reader`); the other fields are required.
"""
