"""The servers a client uses: how to call them, and how they are doing."""
