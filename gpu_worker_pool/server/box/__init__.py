"""This box: its GPUs are read, and the processes of holders are watched."""
