"""The GPUs of a server, the same for our boxes and for the nodes of Ray."""

GPUS_A_BOX = 2
# The last server has one GPU of this model, and no other: for requests that only one GPU of all can serve.
RARE = "H100"
