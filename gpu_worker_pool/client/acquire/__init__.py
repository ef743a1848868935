"""From asking for a GPU to its release."""
