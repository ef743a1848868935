"""What is known of this machine: clock, processes, identity, limits, systemd."""
