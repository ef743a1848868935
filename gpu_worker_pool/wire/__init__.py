"""The protocol, once: the types of every body, the route table, the reader, the transport.

Server, client, command line and doctor all use these; nothing here imports a framework, so that the client stays light.
Each type is what goes over HTTP, key by key and in the order in which it is sent. A field that may be null, or that has
a default, may be missing in what another server sends (see `reader`); the others make a body what it is.
"""
